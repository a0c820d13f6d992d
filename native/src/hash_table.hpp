// A table of record numbers by 64-bit hash that never stalls while it grows: extendible hashing.
//
// The top bits of a hash choose a segment through a directory, the low bits a slot in it (linear probing, deletion by
// shifting back, so nothing accumulates). A segment that is full is split alone. A slot holds 28 bits of the record's
// number and 4 more bits of its hash, which spare most visits to records that do not match. The records hold the keys;
// the table asks HashOf for their hashes when it moves them.
//
// HashOf: uint64_t operator()(uint32_t number) const; void prefetch(uint32_t number) const.
// Source: R. Fagin, J. Nievergelt, N. Pippenger, H. R. Strong, "Extendible hashing" (1979). Not thread safe.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "record_pool.hpp"

namespace tierkv {

constexpr uint32_t kRecordLimit = (uint32_t{1} << 28) - 1;

template <typename HashOf>
class HashTable {
  public:
    static constexpr uint32_t kSegmentSlots = 4096;

    explicit HashTable(HashOf hash_of)
        : hash_of_(std::move(hash_of)), region_(kSegmentLimit * kSegmentSlots * sizeof(uint32_t)) {
        directory_.push_back(0);
        segments_.push_back(new_segment(kSegmentSlots, 0, 0));
    }

    // A walk along the slots where a hash may be.
    struct Probe {
        const uint32_t* slots;
        uint32_t mask;
        uint32_t position;
        uint32_t tag;
    };

    Probe start(uint64_t hash) const {
        const Segment& segment = segments_[directory_[directory_position(hash)]];
        return {segment.slots, segment.mask, static_cast<uint32_t>(hash) & segment.mask, tag_of(hash)};
    }
    static void prefetch(const Probe& probe) { __builtin_prefetch(probe.slots + probe.position); }

    // The next record whose tag fits, or kNone at the end of the walk.
    static uint32_t next(Probe& probe) {
        for (;;) {
            const uint32_t slot = probe.slots[probe.position];
            if (slot == kEmpty) return kNone;
            probe.position = (probe.position + 1) & probe.mask;
            if (slot >> 28 == probe.tag) return slot & kRecordLimit;
        }
    }

    // `number` must not be in the table yet. std::bad_alloc leaves the content as it was.
    void insert(uint64_t hash, uint32_t number) {
        uint32_t which = directory_[directory_position(hash)];
        while (segments_[which].count >= segments_[which].most) {
            make_room(which, hash);
            which = directory_[directory_position(hash)];
        }
        Segment& segment = segments_[which];
        place(segment, hash, number);
        ++size_;
    }

    // `number` must be in the table.
    void erase(uint64_t hash, uint32_t number) {
        Segment& segment = segments_[directory_[directory_position(hash)]];
        const uint32_t wanted = slot_of(hash, number);
        uint32_t hole = static_cast<uint32_t>(hash) & segment.mask;
        while (segment.slots[hole] != wanted) hole = (hole + 1) & segment.mask;
        for (uint32_t ahead = (hole + 1) & segment.mask; segment.slots[ahead] != kEmpty;
             ahead = (ahead + 1) & segment.mask) {
            hash_of_.prefetch(segment.slots[ahead] & kRecordLimit);
        }
        for (uint32_t at = (hole + 1) & segment.mask; segment.slots[at] != kEmpty; at = (at + 1) & segment.mask) {
            const uint32_t home = static_cast<uint32_t>(hash_of_(segment.slots[at] & kRecordLimit)) & segment.mask;
            // It may move into the hole unless that lies before the slot where its walk starts.
            if (((at - home) & segment.mask) >= ((at - hole) & segment.mask)) {
                segment.slots[hole] = segment.slots[at];
                hole = at;
            }
        }
        segment.slots[hole] = kEmpty;
        --segment.count;
        --size_;
    }

    // Makes sure that the next `count` splits find memory.
    void ensure_segments(size_t count) {
        if (count > spare_.size()) region_.grow((region_segments_ + count) * kSegmentSlots * sizeof(uint32_t));
    }
    std::span<std::byte> take_fresh() { return region_.take_fresh(); }

    size_t size() const { return size_; }
    size_t segments() const { return segments_.size(); }
    size_t directory_size() const { return directory_.size(); }
    size_t bytes() const {
        return region_.usable_bytes() + grown_bytes_ + spare_.capacity() * sizeof(uint32_t*) +
               segments_.capacity() * sizeof(Segment) + (directory_.capacity() + moving_.capacity()) * sizeof(uint32_t);
    }

    // Visits the number of each record; null, or what is wrong with the table's own order.
    template <typename Visit>
    const char* check(Visit visit) const {
        size_t total = 0;
        for (size_t position = 0; position < directory_.size(); ++position) {
            const uint32_t which = directory_[position];
            if (which >= segments_.size()) return "the directory names a segment that does not exist";
            if (segments_[which].depth > depth_) return "a segment is deeper than the directory";
        }
        for (size_t which = 0; which < segments_.size(); ++which) {
            const Segment& segment = segments_[which];
            size_t count = 0;
            for (uint32_t at = 0; at <= segment.mask; ++at) {
                if (segment.slots[at] == kEmpty) continue;
                ++count;
                const uint32_t number = segment.slots[at] & kRecordLimit;
                const uint64_t hash = hash_of_(number);
                if (directory_[directory_position(hash)] != which) return "a record is in the wrong segment";
                if (segment.slots[at] != slot_of(hash, number)) return "a slot has the wrong tag";
                for (uint32_t walk = static_cast<uint32_t>(hash) & segment.mask; walk != at;
                     walk = (walk + 1) & segment.mask) {
                    if (segment.slots[walk] == kEmpty) return "a record cannot be reached from its home slot";
                }
                visit(number);
            }
            if (count != segment.count) return "a segment's count is wrong";
            total += count;
        }
        return total == size_ ? nullptr : "the table's size is wrong";
    }

  private:
    static constexpr uint32_t kEmpty = 0xFFFF'FFFF;
    static constexpr size_t kSegmentLimit = size_t{1} << 18;
    static constexpr uint32_t kDeepest = 28;

    struct Segment {
        uint32_t* slots;
        uint32_t mask;
        uint32_t count;
        uint32_t most;                      // splits when it has as many
        uint32_t depth;                     // how many top bits all its records share
        std::unique_ptr<uint32_t[]> grown;  // the slots, where they are more than kSegmentSlots
    };

    static uint32_t tag_of(uint64_t hash) { return static_cast<uint32_t>(hash >> 32) & 15; }
    static uint32_t slot_of(uint64_t hash, uint32_t number) { return tag_of(hash) << 28 | number; }
    // How full a segment gets before it is split: 10/16 to 13/16 of its slots (walks are short below that). Equal
    // limits would make all segments split at about the same time, since they fill evenly.
    static uint32_t most(uint32_t slots, size_t which) {
        const uint64_t spread = (which * 0x9E3779B97F4A7C15) >> 56;
        return static_cast<uint32_t>(uint64_t{slots} * (10 * 256 + 3 * spread) / (16 * 256));
    }
    size_t directory_position(uint64_t hash) const { return static_cast<size_t>((hash >> 1) >> (63 - depth_)); }

    Segment new_segment(uint32_t slots, uint32_t depth, size_t which) {
        Segment segment{nullptr, slots - 1, 0, most(slots, which), depth, nullptr};
        if (slots > kSegmentSlots) {
            segment.grown = std::make_unique_for_overwrite<uint32_t[]>(slots);
            segment.slots = segment.grown.get();
            grown_bytes_ += size_t{slots} * sizeof(uint32_t);
        } else if (!spare_.empty()) {
            segment.slots = spare_.back();
            spare_.pop_back();
        } else {
            region_.grow((region_segments_ + 1) * kSegmentSlots * sizeof(uint32_t));
            segment.slots = reinterpret_cast<uint32_t*>(region_.base()) + region_segments_++ * kSegmentSlots;
        }
        std::fill_n(segment.slots, slots, kEmpty);
        return segment;
    }

    static void place(Segment& segment, uint64_t hash, uint32_t number) {
        uint32_t at = static_cast<uint32_t>(hash) & segment.mask;
        while (segment.slots[at] != kEmpty) at = (at + 1) & segment.mask;
        segment.slots[at] = slot_of(hash, number);
        ++segment.count;
    }

    // Splits the segment, or doubles its slots where its hashes are so alike that splitting would only blow up the
    // directory.
    void make_room(uint32_t which, uint64_t hash) {
        const uint32_t depth = segments_[which].depth;
        const bool may_double = depth_ < kDeepest && directory_.size() <= 16 * segments_.size();
        moving_.reserve(size_t{segments_[which].mask} + 1);
        if (depth < depth_ || may_double) {
            segments_.reserve(segments_.size() + 1);
            std::vector<uint32_t> doubled;
            if (depth == depth_) {
                doubled.resize(directory_.size() * 2);
                for (size_t position = 0; position < doubled.size(); ++position)
                    doubled[position] = directory_[position / 2];
            }
            Segment sibling = new_segment(segments_[which].mask + 1, depth + 1, segments_.size());
            // Nothing below throws.
            if (!doubled.empty()) {
                directory_.swap(doubled);
                ++depth_;
            }
            // The records below the segment's prefix with a 1 behind it go to the sibling.
            const size_t span = directory_.size() >> (depth + 1);
            const size_t first = (directory_position(hash) >> (depth_ - depth)) << (depth_ - depth);
            const auto sibling_number = static_cast<uint32_t>(segments_.size());
            for (size_t position = first + span; position < first + 2 * span; ++position)
                directory_[position] = sibling_number;
            segments_.push_back(std::move(sibling));
            Segment& old = segments_[which];
            old.depth = depth + 1;
            take_out(old);
            Segment* halves[2] = {&old, &segments_.back()};
            spread([&](uint64_t moved) -> Segment& { return *halves[(moved >> (63 - depth)) & 1]; });
            return;
        }
        const uint64_t slots = 2 * (uint64_t{segments_[which].mask} + 1);
        if (slots > uint64_t{1} << 30) throw std::bad_alloc();
        spare_.reserve(spare_.size() + 1);
        Segment larger = new_segment(static_cast<uint32_t>(slots), depth, which);
        Segment& old = segments_[which];
        take_out(old);
        if (old.grown != nullptr) {
            grown_bytes_ -= (size_t{old.mask} + 1) * sizeof(uint32_t);
        } else {
            spare_.push_back(old.slots);
        }
        old = std::move(larger);
        spread([&](uint64_t) -> Segment& { return old; });
    }

    void take_out(Segment& segment) {
        moving_.clear();
        for (uint32_t at = 0; at <= segment.mask; ++at) {
            if (segment.slots[at] == kEmpty) continue;
            moving_.push_back(segment.slots[at] & kRecordLimit);
            segment.slots[at] = kEmpty;
        }
        segment.count = 0;
    }

    template <typename SegmentOf>
    void spread(SegmentOf segment_of) {
        constexpr size_t kAhead = 16;
        for (size_t k = 0; k < moving_.size(); ++k) {
            if (k + kAhead < moving_.size()) hash_of_.prefetch(moving_[k + kAhead]);
            const uint64_t hash = hash_of_(moving_[k]);
            place(segment_of(hash), hash, moving_[k]);
        }
    }

    HashOf hash_of_;
    VirtualRegion region_;
    size_t region_segments_ = 0;
    size_t grown_bytes_ = 0;
    std::vector<uint32_t*> spare_;
    std::vector<Segment> segments_;
    std::vector<uint32_t> directory_;  // 2^depth_ segment numbers
    uint32_t depth_ = 0;
    size_t size_ = 0;
    std::vector<uint32_t> moving_;
};

}  // namespace tierkv
