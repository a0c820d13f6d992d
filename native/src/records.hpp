// The two kinds of record that the index is made of: 40 bytes each, so that a block in one tier costs 80 bytes and its
// share of the hash table.
#pragma once

#include <cstdint>

#include "hash_table.hpp"
#include "record_pool.hpp"

namespace tierkv {

constexpr uint32_t kTierCount = 4;
constexpr uint32_t kNoSlot = 0xFFFF'FFFF;
constexpr uint8_t kNoTier = 0xFF;
constexpr uint32_t kHashBytes = 32;

// A block: its name and the list of its residencies. `head` holds the number of the first one in its low 28 bits and
// the mask of the tiers that hold the block ready in its high 4, so that a look-up needs no second record.
struct Entry {
    uint8_t hash[kHashBytes];
    uint32_t space;
    uint32_t head;

    static constexpr uint32_t kNoHead = kRecordLimit;

    uint32_t first() const { return (head & kRecordLimit) == kNoHead ? kNone : head & kRecordLimit; }
    uint32_t tiers() const { return head >> 28; }
    void set_first(uint32_t residency) { head = (head & ~kRecordLimit) | (residency == kNone ? kNoHead : residency); }
    void add_tier(uint32_t tier) { head |= uint32_t{1} << (28 + tier); }
    void drop_tier(uint32_t tier) { head &= ~(uint32_t{1} << (28 + tier)); }
};
static_assert(sizeof(Entry) == 40);

enum class State : uint8_t { kFree = 0, kPending = 1, kReady = 2, kDoomed = 3 };

// Where a ready residency stands in the order of use; see use_order.hpp.
enum class Place : uint8_t { kNowhere = 0, kListed = 1, kParked = 2, kReturned = 3 };

// A block in a tier. Its number is the handle that Python holds.
struct Residency {
    uint64_t order;  // ready: when it was used last; pending: its number in the table of pending blocks
    uint32_t entry;
    uint32_t slot;
    uint32_t generation;
    uint32_t newer;
    uint32_t older;
    uint32_t next;  // of the same entry
    uint32_t pins;
    uint8_t size_class;
    uint8_t flags;
    State state;
    uint8_t tier : 2;
    uint8_t place_bits : 2;
    uint8_t was_pending : 1;  // doomed before it became ready: its pins are its writers'

    Place place() const { return static_cast<Place>(place_bits); }
    void set_place(Place place) { place_bits = static_cast<uint8_t>(place) & 3; }
};
static_assert(sizeof(Residency) == 40);

}  // namespace tierkv
