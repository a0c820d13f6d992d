// The log of an index's changes: for each block that came into a tier or went from one, the tiers that hold it since.
//
// A ring of fixed size. Readers keep their place in it themselves, as the number of the change they want next, and
// learn when changes were overwritten before they read them. Nothing is kept, and nothing allocated, before begin().
//
// Not thread-safe: the index's mutex guards it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "records.hpp"

namespace tierkv {

struct Change {
    uint8_t hash[kHashBytes];
    uint32_t space;
    uint32_t tiers;
};

struct Changes {
    std::vector<uint8_t> hashes;  // 32 bytes each
    std::vector<uint32_t> spaces;
    std::vector<uint8_t> tiers;
    uint64_t next = 0;  // where to go on reading
    uint64_t lost = 0;  // changes that were overwritten before this call
};

class ChangeLog {
  public:
    void begin(size_t capacity) {
        if (ring_.empty()) ring_.resize(capacity);
    }

    void add(const Entry& entry) {
        if (ring_.empty()) return;
        Change& change = ring_[count_++ % ring_.size()];
        std::memcpy(change.hash, entry.hash, kHashBytes);
        change.space = entry.space;
        change.tiers = entry.tiers();
    }

    uint64_t count() const { return count_; }
    size_t bytes() const { return ring_.capacity() * sizeof(Change); }

    // Looks at up to `most` changes from number `after` on and takes those of `spaces` (sorted; empty: of all).
    Changes read(uint64_t after, size_t most, std::span<const uint32_t> spaces) const {
        Changes found;
        const uint64_t first = count_ - std::min<uint64_t>(count_, ring_.size());
        uint64_t at = std::min(after, count_);
        if (at < first) {
            found.lost = first - at;
            at = first;
        }
        const uint64_t end = at + std::min<uint64_t>(most, count_ - at);
        for (; at < end; ++at) {
            const Change& change = ring_[at % ring_.size()];
            if (!spaces.empty() && !std::binary_search(spaces.begin(), spaces.end(), change.space)) continue;
            found.hashes.insert(found.hashes.end(), change.hash, change.hash + kHashBytes);
            found.spaces.push_back(change.space);
            found.tiers.push_back(static_cast<uint8_t>(change.tiers));
        }
        found.next = end;
        return found;
    }

  private:
    std::vector<Change> ring_;
    uint64_t count_ = 0;
};

}  // namespace tierkv
