// Looking up, adding, pins and removing; index_leases.cpp has what ends by itself, index_scan.cpp the calls that walk
// records, and the check.
#include "index.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "checks.hpp"

namespace tierkv {
namespace {

// How many keys a batch look-up has under way at once: enough to keep all of a core's outstanding loads busy.
constexpr size_t kGroup = 32;
// How far batch loops over records fetch ahead.
constexpr size_t kAhead = 16;

}  // namespace

Index::Index(uint64_t seed)
    : mixer_(seed),
      entries_(kRecordLimit),
      residencies_(kRecordLimit),
      table_(HashOfEntry{&mixer_, &entries_}),
      order_(residencies_) {}

void Index::make_room(size_t blocks) {
    // A batch of any size is spread over the segments; few of them split at once.
    constexpr size_t kSplits = 16;
    std::span<std::byte> fresh[3];
    {
        const std::lock_guard lock(mutex_);
        entries_.ensure(blocks);
        residencies_.ensure(blocks);
        table_.ensure_segments(kSplits);
        fresh[0] = entries_.take_fresh();
        fresh[1] = residencies_.take_fresh();
        fresh[2] = table_.take_fresh();
    }
    for (const std::span<std::byte> range : fresh) VirtualRegion::populate(range);
}

// Looks hashes up in groups, so that the cache misses of a group overlap: while one group is compared, the slots of the
// next are being fetched. visit(first position, entries of the group) returns false to stop; it must not change the
// table.
template <typename VisitGroup>
void Index::each_group(uint32_t space, HashSpan hashes, VisitGroup visit) {
    using Probe = HashTable<HashOfEntry>::Probe;
    Probe probes[2][kGroup];
    uint32_t candidates[kGroup];
    const auto start = [&](size_t first, Probe* group) {
        const size_t count = std::min(kGroup, hashes.count - first);
        for (size_t k = 0; k < count; ++k) {
            group[k] = table_.start(mixer_(hashes[first + k], space));
            table_.prefetch(group[k]);
        }
    };
    if (hashes.count != 0) start(0, probes[0]);
    for (size_t first = 0, turn = 0; first < hashes.count; first += kGroup, turn ^= 1) {
        if (first + kGroup < hashes.count) start(first + kGroup, probes[turn ^ 1]);
        Probe* group = probes[turn];
        const size_t count = std::min(kGroup, hashes.count - first);
        for (size_t k = 0; k < count; ++k) {
            candidates[k] = table_.next(group[k]);
            if (candidates[k] != kNone) entries_.prefetch(candidates[k]);
        }
        for (size_t k = 0; k < count; ++k) {
            while (candidates[k] != kNone) {
                const Entry& entry = entries_[candidates[k]];
                if (std::memcmp(entry.hash, hashes[first + k], kHashBytes) == 0 && entry.space == space) break;
                candidates[k] = table_.next(group[k]);
            }
        }
        if (!visit(first, std::span<const uint32_t>(candidates, count))) return;
    }
}

uint32_t Index::find(uint32_t space, const uint8_t* hash, uint64_t mixed) const {
    auto probe = table_.start(mixed);
    for (;;) {
        const uint32_t candidate = table_.next(probe);
        if (candidate == kNone) return kNone;
        const Entry& entry = entries_[candidate];
        if (std::memcmp(entry.hash, hash, kHashBytes) == 0 && entry.space == space) return candidate;
    }
}

void Index::find_all(uint32_t space, HashSpan hashes) {
    found_.resize(hashes.count);
    each_group(space, hashes, [&](size_t first, std::span<const uint32_t> entries) {
        std::copy(entries.begin(), entries.end(), found_.begin() + static_cast<ptrdiff_t>(first));
        for (const uint32_t entry : entries) {
            if (entry == kNone) continue;
            const uint32_t residency = entries_[entry].first();
            if (residency != kNone) residencies_.prefetch(residency);
        }
        return true;
    });
}

uint32_t Index::entry_at(uint32_t space, HashSpan hashes, size_t position) {
    if (found_[position] != kNone) return found_[position];
    return find(space, hashes[position], mixer_(hashes[position], space));
}

uint32_t Index::make_entry(uint32_t space, const uint8_t* hash) {
    const uint32_t number = entries_.allocate();
    Entry& entry = entries_[number];
    std::memcpy(entry.hash, hash, kHashBytes);
    entry.space = space;
    entry.head = Entry::kNoHead;
    try {
        table_.insert(mixer_(hash, space), number);
    } catch (...) {
        entries_.release(number);
        throw;
    }
    return number;
}

uint32_t Index::residency_in(uint32_t entry, uint32_t tier) const {
    for (uint32_t at = entries_[entry].first(); at != kNone; at = residencies_[at].next) {
        if (residencies_[at].tier == tier && residencies_[at].state != State::kDoomed) return at;
    }
    return kNone;
}

uint32_t Index::ready_in(uint32_t entry, uint32_t tier) const {
    if ((entries_[entry].tiers() >> tier & 1) == 0) return kNone;
    return residency_in(entry, tier);
}

// The record must have been ensured.
uint32_t Index::add_residency(uint32_t entry, uint32_t tier, uint32_t slot, uint32_t size_class, State state) {
    const uint32_t number = residencies_.allocate();
    Residency& record = residencies_[number];
    record.entry = entry;
    record.slot = slot;
    if (++last_generation_ == 0) ++last_generation_;
    record.generation = last_generation_;
    record.size_class = static_cast<uint8_t>(size_class);
    record.tier = tier & 3;
    record.state = state;
    record.next = entries_[entry].first();
    entries_[entry].set_first(number);
    if (state == State::kReady) {
        entries_[entry].add_tier(tier);
        log_.add(entries_[entry]);
        ++ready_[tier];
    }
    return number;
}

// From pending to ready; the caller gives it its place in the order of use.
void Index::make_ready(uint32_t residency) {
    drop_pending(residency);
    Residency& record = residencies_[residency];
    record.state = State::kReady;
    entries_[record.entry].add_tier(record.tier);
    log_.add(entries_[record.entry]);
    ++ready_[record.tier];
}

uint32_t Index::add_pending(uint32_t residency, uint32_t part_count, double deadline) {
    uint32_t number;
    if (!pending_free_.empty()) {
        number = pending_free_.back();
        pending_free_.pop_back();
    } else {
        number = static_cast<uint32_t>(pending_.size());
        pending_.emplace_back();
    }
    pending_[number] = {residency, part_count, 0, 0, deadline};
    residencies_[residency].order = number;
    return number;
}

void Index::drop_pending(uint32_t residency) {
    const auto number = static_cast<uint32_t>(residencies_[residency].order);
    pending_[number] = Pending{};
    pending_free_.push_back(number);  // its capacity was made with the table
    residencies_[residency].order = 0;
}

void Index::pin(uint32_t residency) {
    ++residencies_[residency].pins;
    ++pins_;
}

void Index::unpin(uint32_t residency) {
    Residency& record = residencies_[residency];
    --pins_;
    if (--record.pins != 0) return;
    if (record.state == State::kDoomed) {
        free_residency(residency);
    } else if (record.state == State::kReady) {
        order_.unpinned(residency);
    }
}

// Ready or pending -> doomed, and freed where nothing pins it.
void Index::doom(uint32_t residency) {
    Residency& record = residencies_[residency];
    if (record.state == State::kReady) {
        order_.remove(residency);
        entries_[record.entry].drop_tier(record.tier);
        log_.add(entries_[record.entry]);
        --ready_[record.tier];
    } else {
        drop_pending(residency);
        record.was_pending = 1;
    }
    record.state = State::kDoomed;
    ++doomed_;
    if (record.pins == 0) free_residency(residency);
}

void Index::free_residency(uint32_t residency) {
    Residency& record = residencies_[residency];
    const uint32_t number = record.entry;
    Entry& entry = entries_[number];
    Freed& freed = freed_[record.tier].emplace_back();
    freed.slot = record.slot;
    freed.space = entry.space;
    std::memcpy(freed.hash, entry.hash, kHashBytes);
    freed.size_class = record.size_class;
    if (entry.first() == residency) {
        entry.set_first(record.next);
    } else {
        uint32_t before = entry.first();
        while (residencies_[before].next != residency) before = residencies_[before].next;
        residencies_[before].next = record.next;
    }
    record.state = State::kFree;
    --doomed_;
    residencies_.release(residency);
    if (entry.first() != kNone) return;
    table_.erase(mixer_(entry.hash, entry.space), number);
    entries_.release(number);
}

bool Index::pinned(uint32_t handle) const {
    return handle < residencies_.end() && residencies_[handle].state != State::kFree && residencies_[handle].pins != 0;
}

template <typename Fits>
void Index::check_handles(std::span<const uint32_t> handles, bool skip_none, const char* expected, Fits fits) {
    // Takes the pins away on trial, so that a handle listed twice needs two, and gives them back.
    size_t good = 0;
    while (good < handles.size()) {
        const uint32_t handle = handles[good];
        if (!(skip_none && handle == kNoSlot)) {
            if (!pinned(handle) || !fits(residencies_[handle])) break;
            --residencies_[handle].pins;
        }
        ++good;
    }
    for (size_t k = 0; k < good; ++k) {
        if (!(skip_none && handles[k] == kNoSlot)) ++residencies_[handles[k]].pins;
    }
    if (good == handles.size()) return;
    refuse("handle " + std::to_string(handles[good]) + " at position " + std::to_string(good) + ": " +
           (pinned(handles[good]) ? expected : "it has no such pin") + "; nothing was changed");
}

size_t Index::match(uint32_t space, HashSpan hashes, uint32_t tier_mask) {
    check_mask(tier_mask);
    const std::lock_guard lock(mutex_);
    size_t length = 0;
    each_group(space, hashes, [&](size_t, std::span<const uint32_t> entries) {
        for (const uint32_t entry : entries) {
            if (entry == kNone || (entries_[entry].tiers() & tier_mask) == 0) return false;
            ++length;
        }
        return true;
    });
    return length;
}

size_t Index::prefix(uint32_t space, HashSpan hashes, uint32_t tier_mask, std::span<uint8_t> masks) {
    check_mask(tier_mask);
    const std::lock_guard lock(mutex_);
    size_t length = 0;
    each_group(space, hashes, [&](size_t, std::span<const uint32_t> entries) {
        for (const uint32_t entry : entries) {
            const uint32_t tiers = entry == kNone ? 0 : entries_[entry].tiers() & tier_mask;
            if (tiers == 0) return false;
            masks[length++] = static_cast<uint8_t>(tiers);
        }
        return true;
    });
    return length;
}

void Index::lookup(uint32_t space, HashSpan hashes, std::span<uint8_t> masks) {
    const std::lock_guard lock(mutex_);
    each_group(space, hashes, [&](size_t first, std::span<const uint32_t> entries) {
        for (size_t k = 0; k < entries.size(); ++k) {
            masks[first + k] = entries[k] == kNone ? 0 : static_cast<uint8_t>(entries_[entries[k]].tiers());
        }
        return true;
    });
}

void Index::resolve(uint32_t space, HashSpan hashes, uint32_t tier, std::span<uint32_t> slots,
                    std::span<uint32_t> generations) {
    check_tier(tier);
    const std::lock_guard lock(mutex_);
    find_all(space, hashes);
    for (size_t k = 0; k < hashes.count; ++k) {
        const uint32_t residency = found_[k] == kNone ? kNone : ready_in(found_[k], tier);
        slots[k] = residency == kNone ? kNoSlot : residencies_[residency].slot;
        generations[k] = residency == kNone ? 0 : residencies_[residency].generation;
    }
}

void Index::valid(uint32_t space, HashSpan hashes, uint32_t tier, std::span<const uint32_t> slots,
                  std::span<const uint32_t> generations, std::span<uint8_t> results) {
    check_tier(tier);
    check_size("slots", slots.size(), hashes.count);
    check_size("generations", generations.size(), hashes.count);
    const std::lock_guard lock(mutex_);
    find_all(space, hashes);
    for (size_t k = 0; k < hashes.count; ++k) {
        const uint32_t residency = found_[k] == kNone ? kNone : ready_in(found_[k], tier);
        results[k] = residency != kNone && residencies_[residency].slot == slots[k] &&
                     residencies_[residency].generation == generations[k];
    }
}

void Index::insert(uint32_t space, HashSpan hashes, uint32_t tier, std::span<const uint32_t> slots, uint32_t size_class,
                   std::span<uint8_t> added) {
    check_tier(tier);
    check_class(size_class);
    check_size("slots", slots.size(), hashes.count);
    check_slots(slots);
    make_room(hashes.count);
    const std::lock_guard lock(mutex_);
    find_all(space, hashes);
    entries_.ensure(hashes.count);
    residencies_.ensure(hashes.count);
    for (size_t k = 0; k < hashes.count; ++k) {
        uint32_t entry = entry_at(space, hashes, k);
        added[k] = entry == kNone || residency_in(entry, tier) == kNone;
        if (entry == kNone) entry = make_entry(space, hashes[k]);
        // From here on found_ holds the new residencies instead of the entries.
        found_[k] = added[k] ? add_residency(entry, tier, slots[k], size_class, State::kReady) : kNone;
    }
    order_.begin_call();
    for (size_t k = hashes.count; k-- > 0;) {
        if (added[k]) order_.use(found_[k]);
    }
}

size_t Index::reserve(uint32_t space, HashSpan hashes, uint32_t tier, std::span<const uint32_t> slots,
                      uint32_t size_class, uint32_t part, uint32_t part_count, double deadline,
                      std::span<uint8_t> outcomes, std::span<uint32_t> used_slots, std::span<uint32_t> handles) {
    check_tier(tier);
    check_class(size_class);
    check_slots(slots);
    check_deadline(deadline);
    if (part_count < 1 || part_count > kMostParts || part >= part_count) {
        refuse("part " + std::to_string(part) + " of " + std::to_string(part_count) +
               ": a block has 1 to 64 parts, counted from 0");
    }
    make_room(std::min(hashes.count, slots.size()));
    const std::lock_guard lock(mutex_);
    find_all(space, hashes);
    const size_t most_new = std::min(hashes.count, slots.size());
    entries_.ensure(most_new);
    residencies_.ensure(most_new);
    const size_t most_pending = pending_.size() - pending_free_.size() + most_new;
    if (pending_.capacity() < most_pending) pending_.reserve(std::max(most_pending, 2 * pending_.capacity()));
    pending_free_.reserve(pending_.capacity());
    const uint64_t bit = uint64_t{1} << part;
    size_t used = 0;
    for (size_t k = 0; k < hashes.count; ++k) {
        uint32_t entry = entry_at(space, hashes, k);
        uint32_t residency = entry == kNone ? kNone : residency_in(entry, tier);
        Reserve outcome = Reserve::kNoSlot;
        if (residency == kNone) {
            if (used < slots.size()) {
                if (entry == kNone) entry = make_entry(space, hashes[k]);
                residency = add_residency(entry, tier, slots[used++], size_class, State::kPending);
                add_pending(residency, part_count, deadline);
                outcome = Reserve::kNew;
            }
        } else if (residencies_[residency].state == State::kReady) {
            outcome = Reserve::kKnown;
        } else {
            const Pending& pending = pending_[residencies_[residency].order];
            // Another part count: the whole block is on its way (a promotion), or its parts are. Theirs counts.
            const bool busy = pending.part_count != part_count || ((pending.written | pending.writing) & bit) != 0;
            outcome = busy ? Reserve::kBusy : Reserve::kJoined;
        }
        const bool reserved = outcome == Reserve::kNew || outcome == Reserve::kJoined;
        if (reserved) {
            Pending& pending = pending_[residencies_[residency].order];
            pending.writing |= bit;
            pending.deadline = std::max(pending.deadline, deadline);
            pin(residency);
        }
        outcomes[k] = static_cast<uint8_t>(outcome);
        used_slots[k] = reserved ? residencies_[residency].slot : kNoSlot;
        handles[k] = reserved ? residency : kNoSlot;
    }
    return used;
}

void Index::commit(std::span<const uint32_t> handles, uint32_t part, std::span<uint8_t> completed) {
    if (part >= kMostParts) refuse("part must be within 0..63, got " + std::to_string(part));
    const uint64_t bit = uint64_t{1} << part;
    const std::lock_guard lock(mutex_);
    check_handles(handles, false, "part is not being written there, or it is no reservation",
                  [&](const Residency& record) {
                      if (record.state == State::kPending) return (pending_[record.order].writing & bit) != 0;
                      return record.state == State::kDoomed && record.was_pending == 1;
                  });
    // A part has one writer, so a pending block that is listed twice was not reserved twice for it.
    for (size_t k = 0; k < handles.size(); ++k) {
        const Residency& record = residencies_[handles[k]];
        if (record.state != State::kPending) continue;
        Pending& pending = pending_[record.order];
        if ((pending.writing & bit) != 0) {
            pending.writing &= ~bit;
            continue;
        }
        for (size_t undo = 0; undo < k; ++undo) {
            const Residency& earlier = residencies_[handles[undo]];
            if (earlier.state == State::kPending) pending_[earlier.order].writing |= bit;
        }
        refuse("handle " + std::to_string(handles[k]) + " stands twice in one commit; nothing was changed");
    }
    for (size_t k = 0; k < handles.size(); ++k) {
        Residency& record = residencies_[handles[k]];
        completed[k] = 0;
        if (record.state == State::kPending) {
            Pending& pending = pending_[record.order];
            pending.written |= bit;
            completed[k] = pending.written == ~uint64_t{0} >> (kMostParts - pending.part_count);
            if (completed[k]) make_ready(handles[k]);
        }
        // A completed block has no place in the order of use yet, so releasing its pin does not move it.
        unpin(handles[k]);
    }
    order_.begin_call();
    for (size_t k = handles.size(); k-- > 0;) {
        if (completed[k]) order_.use(handles[k]);
    }
}

void Index::abort(std::span<const uint32_t> handles) {
    const std::lock_guard lock(mutex_);
    check_handles(handles, false, "it is no reservation", [](const Residency& record) {
        return record.state == State::kPending || (record.state == State::kDoomed && record.was_pending == 1);
    });
    for (const uint32_t handle : handles) {
        if (residencies_[handle].state == State::kPending) doom(handle);
        unpin(handle);
    }
}

// A keyspace that is being cleared gets no copies of what is about to go: they could lie behind clear()'s walk.
bool Index::may_copy(const Residency& source, uint32_t tier) const {
    if (source.state != State::kReady || residency_in(source.entry, tier) != kNone) return false;
    return std::find(clearing_.begin(), clearing_.end(), entries_[source.entry].space) == clearing_.end();
}

void Index::attach(std::span<const uint32_t> handles, uint32_t tier, std::span<const uint32_t> slots,
                   uint32_t size_class, std::span<uint8_t> added) {
    check_tier(tier);
    check_class(size_class);
    check_size("slots", slots.size(), handles.size());
    check_slots(slots);
    make_room(handles.size());
    const std::lock_guard lock(mutex_);
    for (const uint32_t handle : handles) {
        if (!pinned(handle) || residencies_[handle].state == State::kPending) {
            refuse("handle " + std::to_string(handle) + ": it has no pin or is not ready; nothing was changed");
        }
    }
    residencies_.ensure(handles.size());
    found_.resize(handles.size());
    for (size_t k = 0; k < handles.size(); ++k) {
        const Residency& source = residencies_[handles[k]];
        added[k] = may_copy(source, tier);
        if (!added[k]) continue;
        const uint8_t reused = source.flags & kFlagReused;
        found_[k] = add_residency(source.entry, tier, slots[k], size_class, State::kReady);
        residencies_[found_[k]].flags |= reused;
    }
    order_.begin_call();
    for (size_t k = handles.size(); k-- > 0;) {
        if (added[k]) order_.use(found_[k]);
    }
}

void Index::attach_pending(std::span<const uint32_t> handles, uint32_t tier, std::span<const uint32_t> slots,
                           uint32_t size_class, double deadline, std::span<uint32_t> reserved) {
    check_tier(tier);
    check_class(size_class);
    check_size("slots", slots.size(), handles.size());
    check_slots(slots);
    check_deadline(deadline);
    make_room(handles.size());
    const std::lock_guard lock(mutex_);
    for (const uint32_t handle : handles) {
        if (!pinned(handle) || residencies_[handle].state == State::kPending) {
            refuse("handle " + std::to_string(handle) + ": it has no pin or is not ready; nothing was changed");
        }
    }
    residencies_.ensure(handles.size());
    const size_t most_pending = pending_.size() - pending_free_.size() + handles.size();
    if (pending_.capacity() < most_pending) pending_.reserve(std::max(most_pending, 2 * pending_.capacity()));
    pending_free_.reserve(pending_.capacity());
    for (size_t k = 0; k < handles.size(); ++k) {
        const Residency& source = residencies_[handles[k]];
        reserved[k] = kNoSlot;
        if (!may_copy(source, tier)) continue;
        const uint8_t reused = source.flags & kFlagReused;
        const uint32_t residency = add_residency(source.entry, tier, slots[k], size_class, State::kPending);
        add_pending(residency, 1, deadline);
        pending_[residencies_[residency].order].writing |= 1;
        residencies_[residency].flags |= reused;
        pin(residency);
        reserved[k] = residency;
    }
}

// For the entries that find_all() found.
void Index::acquire_found(std::span<const uint8_t> tier_order, const AcquiredSpans& acquired) {
    for (size_t k = 0; k < found_.size(); ++k) {
        uint32_t residency = kNone;
        if (found_[k] != kNone) {
            for (const uint8_t tier : tier_order) {
                residency = ready_in(found_[k], tier);
                if (residency != kNone) break;
            }
        }
        if (residency == kNone) {
            acquired.tiers[k] = kNoTier;
            acquired.slots[k] = kNoSlot;
            acquired.generations[k] = 0;
            acquired.handles[k] = kNoSlot;
            continue;
        }
        const Residency& record = residencies_[residency];
        pin(residency);
        acquired.tiers[k] = record.tier;
        acquired.slots[k] = record.slot;
        acquired.generations[k] = record.generation;
        acquired.handles[k] = residency;
    }
}

void Index::acquire(uint32_t space, HashSpan hashes, std::span<const uint8_t> tier_order,
                    const AcquiredSpans& acquired) {
    check_order(tier_order);
    const std::lock_guard lock(mutex_);
    find_all(space, hashes);
    acquire_found(tier_order, acquired);
}

void Index::release(std::span<const uint32_t> handles) {
    const std::lock_guard lock(mutex_);
    check_handles(handles, true, "it is a reservation: use commit() or abort()",
                  [](const Residency& record) { return record.state != State::kPending; });
    for (const uint32_t handle : handles) {
        if (handle != kNoSlot) unpin(handle);
    }
}

void Index::touch(uint32_t space, HashSpan hashes, uint32_t tier_mask, bool suffix_first, bool mark, bool move,
                  bool fastest) {
    check_mask(tier_mask);
    const std::lock_guard lock(mutex_);
    find_all(space, hashes);
    if (move) order_.begin_call();
    const size_t count = found_.size();
    const auto at = [&](size_t step) { return found_[suffix_first ? count - 1 - step : step]; };
    for (size_t step = 0; step < count; ++step) {
        // Two records ahead of the use: first the residency, then its neighbours in the list.
        if (step + kAhead < count && at(step + kAhead) != kNone) {
            const uint32_t coming = entries_[at(step + kAhead)].first();
            if (coming != kNone) residencies_.prefetch(coming);
        }
        if (step + kAhead / 2 < count && at(step + kAhead / 2) != kNone) {
            const uint32_t coming = entries_[at(step + kAhead / 2)].first();
            if (coming != kNone && residencies_[coming].state == State::kReady) order_.prefetch_neighbours(coming);
        }
        const uint32_t entry = at(step);
        if (entry == kNone) continue;
        uint32_t wanted = entries_[entry].tiers() & tier_mask;
        if (wanted == 0) continue;
        if (fastest) wanted &= 0U - wanted;  // the lowest bit
        for (uint32_t residency = entries_[entry].first(); residency != kNone;
             residency = residencies_[residency].next) {
            Residency& record = residencies_[residency];
            if (record.state != State::kReady || (wanted >> record.tier & 1) == 0) continue;
            if (mark) record.flags |= kFlagReused;
            if (move) order_.use(residency);
        }
    }
}

size_t Index::erase_pinned(std::span<const uint32_t> handles, bool spare_shared) {
    const std::lock_guard lock(mutex_);
    check_handles(handles, false, "it is a reservation: use abort()",
                  [](const Residency& record) { return record.state != State::kPending; });
    size_t erased = 0;
    for (size_t k = 0; k < handles.size(); ++k) {
        if (k + kAhead < handles.size()) entries_.prefetch(residencies_[handles[k + kAhead]].entry);
        if (k + kAhead / 2 < handles.size()) {
            const Entry& coming = entries_[residencies_[handles[k + kAhead / 2]].entry];
            table_.prefetch(table_.start(mixer_(coming.hash, coming.space)));
        }
        const Residency& record = residencies_[handles[k]];
        if (record.state == State::kReady && !(spare_shared && record.pins > 1)) {
            doom(handles[k]);
            ++erased;
        }
        unpin(handles[k]);
    }
    return erased;
}

size_t Index::remove(uint32_t space, HashSpan hashes, uint32_t tier_mask) {
    check_mask(tier_mask);
    const std::lock_guard lock(mutex_);
    size_t removed = 0;
    find_all(space, hashes);
    for (const uint32_t entry : found_) {
        if (entry == kNone) continue;
        // An entry that an earlier equal hash freed has an empty list.
        for (uint32_t residency = entries_[entry].first(), next; residency != kNone; residency = next) {
            next = residencies_[residency].next;
            if (residencies_[residency].state == State::kDoomed) continue;
            if ((tier_mask >> residencies_[residency].tier & 1) == 0) continue;
            doom(residency);
            ++removed;
        }
    }
    return removed;
}

std::deque<Freed> Index::take_freed(uint32_t tier) {
    check_tier(tier);
    std::deque<Freed> taken;
    const std::lock_guard lock(mutex_);
    taken.swap(freed_[tier]);
    return taken;
}

}  // namespace tierkv
