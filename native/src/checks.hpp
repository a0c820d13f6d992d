// Checks of the arguments of the index's calls. All throw std::invalid_argument, before anything has changed.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>

#include "records.hpp"

namespace tierkv {

[[noreturn]] inline void refuse(const std::string& message) {
    throw std::invalid_argument(message);
}

inline void check_tier(uint32_t tier) {
    if (tier >= kTierCount) refuse("tier must be within 0..3, got " + std::to_string(tier));
}

inline void check_class(uint32_t size_class) {
    if (size_class > 255) refuse("size_class must be within 0..255, got " + std::to_string(size_class));
}

inline void check_mask(uint32_t tier_mask) {
    if (tier_mask > 15) refuse("tier_mask must be within 0..15, got " + std::to_string(tier_mask));
}

inline void check_size(const char* what, size_t size, size_t expected) {
    if (size != expected) {
        refuse(std::string(what) + ": expected " + std::to_string(expected) + " entries, got " + std::to_string(size));
    }
}

inline void check_slots(std::span<const uint32_t> slots) {
    for (const uint32_t slot : slots) {
        if (slot == kNoSlot) refuse("slots must not contain NO_SLOT");
    }
}

inline void check_order(std::span<const uint8_t> tier_order) {
    for (const uint8_t tier : tier_order) check_tier(tier);
}

inline void check_deadline(double deadline) {
    if (std::isnan(deadline)) refuse("deadline must not be NaN");
}

}  // namespace tierkv
