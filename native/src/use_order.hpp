// The order of use of ready residencies: one list per tier and size class, newest first.
//
// Every use gets a stamp that is never given twice: the number of the call in the high 40 bits, the position in the
// call in the low 24. Victims come strictly in order of these stamps among the unpinned.
//
// Pinned residencies stay where they are until a search for victims meets one at the old end. It is then parked: taken
// out of the list, so that no later search walks over it. When its last pin goes, it enters a heap of returned ones.
// Whatever was parked or returned is older than all that is still listed (it was the oldest when it was parked, and
// what is listed later is newer), so the oldest unpinned residency is the heap's top or, when that is empty, the first
// unpinned one from the list's old end. Each parking is paid for by a pin, so searches stay short on average.
//
// Not thread safe.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "records.hpp"

namespace tierkv {

class UseOrder {
  public:
    explicit UseOrder(RecordPool<Residency>& residencies) : residencies_(residencies) {}

    // The stamps that follow belong to a new call.
    void begin_call() { clock_ = ((clock_ >> kCallShift) + 1) << kCallShift; }
    uint64_t age_calls(uint32_t residency) const {
        return (clock_ >> kCallShift) - (residencies_[residency].order >> kCallShift);
    }

    // Makes a ready residency the most recently used of its tier and class, whether it had a place yet or not.
    void use(uint32_t residency);
    // Takes it out, wherever it is.
    void remove(uint32_t residency);
    // The least recently used unpinned residency, or kNone. Parks the pinned ones that it meets.
    uint32_t oldest_unpinned(uint32_t tier, uint32_t size_class);
    // For a residency that oldest_unpinned() returned and that has just been pinned.
    void park(uint32_t residency);
    // For a ready residency whose last pin is gone.
    void unpinned(uint32_t residency);

    // Classes are 0..classes(tier) - 1.
    size_t classes(uint32_t tier) const { return lists_[tier].size(); }
    void prefetch_neighbours(uint32_t residency) const;
    size_t bytes() const;
    // Empty, or the first broken invariant.
    std::string check() const;

  private:
    static constexpr uint32_t kCallShift = 24;

    struct Returned {
        uint64_t order;
        uint32_t residency;
        // For the standard heap functions, which keep the greatest on top.
        bool operator<(const Returned& other) const { return order > other.order; }
    };

    struct List {
        uint32_t newest = kNone;
        uint32_t oldest = kNone;
        uint64_t listed = 0;
        uint64_t parked = 0;
        uint64_t returned = 0;       // entries of the heap that are not stale
        std::vector<Returned> heap;  // stale where the residency was used again or removed
    };

    List& list_of(const Residency& record);
    void unlink(List& list, uint32_t residency);
    void leave_heap(List& list);
    bool stale(const Returned& entry) const {
        const Residency& record = residencies_[entry.residency];
        return record.state != State::kReady || record.place() != Place::kReturned || record.order != entry.order;
    }
    void take_out(List& list, uint32_t residency);

    RecordPool<Residency>& residencies_;
    std::array<std::vector<List>, kTierCount> lists_;
    uint64_t clock_ = 0;
};

}  // namespace tierkv
