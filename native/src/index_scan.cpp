// The calls of the index that walk records: victims, flushing, clearing, exporting, and the check of all invariants.
#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>

#include "index.hpp"

namespace tierkv {
namespace {

constexpr size_t kAhead = 16;
// Records that a long walk looks at before it lets others have the mutex.
constexpr uint32_t kStride = 16 * 1024;
// Records that one call of export_ready() looks at.
constexpr uint32_t kExportStride = 64 * 1024;

void check_tier(uint32_t tier) {
    if (tier >= kTierCount) throw std::invalid_argument("tier must be within 0..3, got " + std::to_string(tier));
}

}  // namespace

// Pins it and notes what the caller gets to know.
void Index::choose(Chosen& chosen, uint32_t residency) {
    const Residency& record = residencies_[residency];
    const Entry& entry = entries_[record.entry];
    chosen.hashes.insert(chosen.hashes.end(), entry.hash, entry.hash + kHashBytes);
    chosen.handles.push_back(residency);
    chosen.slots.push_back(record.slot);
    chosen.spaces.push_back(entry.space);
    chosen.flags.push_back(record.flags);
    chosen.tiers.push_back(static_cast<uint8_t>(entry.tiers()));
    pin(residency);
}

Chosen Index::victims(uint32_t tier, uint32_t size_class, size_t count) {
    check_tier(tier);
    const std::lock_guard lock(mutex_);
    Chosen chosen;
    while (chosen.handles.size() < count) {
        const uint32_t residency = order_.oldest_unpinned(tier, size_class);
        if (residency == kNone) break;
        order_.park(residency);
        choose(chosen, residency);
    }
    return chosen;
}

Chosen Index::choose_in_slots(uint32_t tier, std::span<const uint32_t> slots) {
    check_tier(tier);
    if (!std::is_sorted(slots.begin(), slots.end())) throw std::invalid_argument("slots must be sorted");
    Chosen chosen;
    if (slots.empty()) return chosen;
    for (uint32_t first = 0;;) {
        const std::lock_guard lock(mutex_);
        const uint32_t end = residencies_.end();
        if (first >= end) return chosen;
        const uint32_t stop = first + std::min(kStride, end - first);
        for (; first < stop; ++first) {
            const Residency& record = residencies_[first];
            if (record.state != State::kReady || record.tier != tier || record.pins != 0) continue;
            if (record.slot < slots.front() || record.slot > slots.back()) continue;
            if (std::binary_search(slots.begin(), slots.end(), record.slot)) choose(chosen, first);
        }
    }
}

Chosen Index::choose_lacking(uint32_t tier, uint32_t other, size_t count, uint32_t after) {
    check_tier(tier);
    check_tier(other);
    Chosen chosen;
    for (uint32_t first = after == kNone ? 0 : after + 1;;) {
        const std::lock_guard lock(mutex_);
        const uint32_t end = residencies_.end();
        if (first >= end || chosen.handles.size() >= count) return chosen;
        const uint32_t stop = first + std::min(kStride, end - first);
        for (; first < stop && chosen.handles.size() < count; ++first) {
            if (first + kAhead < end) entries_.prefetch(residencies_[first + kAhead].entry);
            const Residency& record = residencies_[first];
            if (record.state != State::kReady || record.tier != tier) continue;
            if ((entries_[record.entry].tiers() >> other & 1) == 0) choose(chosen, first);
        }
    }
}

Oldest Index::oldest(uint32_t tier) {
    check_tier(tier);
    const std::lock_guard lock(mutex_);
    Oldest result;
    for (size_t size_class = 0; size_class < order_.classes(tier); ++size_class) {
        const uint32_t residency = order_.oldest_unpinned(tier, static_cast<uint32_t>(size_class));
        if (residency == kNone) continue;
        result.size_classes.push_back(static_cast<uint8_t>(size_class));
        result.ages_calls.push_back(static_cast<uint32_t>(std::min<uint64_t>(order_.age_calls(residency), UINT32_MAX)));
        result.slots.push_back(residencies_[residency].slot);
    }
    return result;
}

size_t Index::clear(uint32_t space) {
    {
        const std::lock_guard lock(mutex_);
        clearing_.push_back(space);
    }
    size_t removed = 0;
    for (uint32_t first = 0;;) {
        const std::lock_guard lock(mutex_);
        const uint32_t end = residencies_.end();
        if (first >= end) {
            clearing_.erase(std::find(clearing_.begin(), clearing_.end(), space));
            return removed;
        }
        const uint32_t stop = first + std::min(kStride, end - first);
        for (; first < stop; ++first) {
            if (first + kAhead < end) entries_.prefetch(residencies_[first + kAhead].entry);
            const Residency& record = residencies_[first];
            if (record.state != State::kReady && record.state != State::kPending) continue;
            if (entries_[record.entry].space != space) continue;
            doom(first);
            ++removed;
        }
    }
}

Exported Index::export_ready(uint32_t space, uint32_t tier, uint32_t after, size_t count) {
    check_tier(tier);
    if (count == 0) throw std::invalid_argument("count must be 1 or more");
    const std::lock_guard lock(mutex_);
    Exported result;
    const uint32_t end = residencies_.end();
    uint32_t at = after == kNone ? 0 : after + 1;
    if (at >= end) return result;
    const uint32_t stop = at + std::min(kExportStride, end - at);
    for (; at < stop && result.slots.size() < count; ++at) {
        const Residency& record = residencies_[at];
        if (record.state != State::kReady || record.tier != tier) continue;
        const Entry& entry = entries_[record.entry];
        if (entry.space != space) continue;
        result.hashes.insert(result.hashes.end(), entry.hash, entry.hash + kHashBytes);
        result.slots.push_back(record.slot);
        result.generations.push_back(record.generation);
    }
    if (at < end) result.cursor = at - 1;
    return result;
}

void Index::log_changes(size_t capacity) {
    if (capacity == 0) throw std::invalid_argument("capacity must be 1 or more");
    const std::lock_guard lock(mutex_);
    log_.begin(capacity);
}

Changes Index::changes(uint64_t after, size_t count, std::span<const uint32_t> spaces) {
    if (!std::is_sorted(spaces.begin(), spaces.end())) throw std::invalid_argument("spaces must be sorted");
    const std::lock_guard lock(mutex_);
    return log_.read(after, count, spaces);
}

uint64_t Index::bytes() const {
    uint64_t total = sizeof(Index) + entries_.bytes() + residencies_.bytes() + table_.bytes() + order_.bytes();
    total += log_.bytes();
    total += pending_.capacity() * sizeof(Pending) + pending_free_.capacity() * sizeof(uint32_t);
    total += found_.capacity() * sizeof(uint32_t);
    for (const std::deque<Freed>& freed : freed_) total += freed.size() * sizeof(Freed);
    // A map's node: its value, a link and the allocator's header.
    total += leases_.bucket_count() * sizeof(void*);
    for (const auto& [number, lease] : leases_) {
        total += sizeof(number) + sizeof(lease) + 2 * sizeof(void*) + lease.handles.capacity() * sizeof(uint32_t);
    }
    return total;
}

IndexStats Index::stats() {
    const std::lock_guard lock(mutex_);
    IndexStats stats;
    stats.entries = entries_.used();
    stats.residencies = residencies_.used();
    for (uint32_t tier = 0; tier < kTierCount; ++tier) stats.ready[tier] = ready_[tier];
    stats.pending = pending_.size() - pending_free_.size();
    stats.doomed = doomed_;
    stats.pins = pins_;
    stats.leases = leases_.size();
    stats.bytes = bytes();
    return stats;
}

// Of one residency in use: its pending record, and what its state implies.
std::string Index::check_residency(uint32_t residency) const {
    const Residency& record = residencies_[residency];
    const std::string name = "residency " + std::to_string(residency);
    if (record.generation == 0) return name + " has generation 0";
    if (record.slot == kNoSlot) return name + " has no slot";
    if (record.state == State::kDoomed) return record.pins == 0 ? name + " is doomed but nothing pins it" : "";
    if (record.was_pending != 0) return name + " is not doomed but marked as a doomed reservation";
    if (record.state == State::kReady) return {};
    if (record.order >= pending_.size()) return name + " has no pending record";
    const Pending& pending = pending_[record.order];
    if (pending.residency != residency) return name + " has another's pending record";
    if (pending.part_count < 1 || pending.part_count > kMostParts) return name + ": its number of parts is impossible";
    const uint64_t all = ~uint64_t{0} >> (kMostParts - pending.part_count);
    if (((pending.written | pending.writing) & ~all) != 0) return name + ": a part beyond its number of parts";
    if ((pending.written & pending.writing) != 0) return name + ": a part is written and being written";
    if (pending.written == all) return name + " is pending with all parts in";
    if (static_cast<uint32_t>(std::popcount(pending.writing)) != record.pins)
        return name + ": its pins are not its writers";
    return {};
}

// Of all entries: their lists of residencies and their masks. Marks the residencies that it meets.
std::string Index::check_entries(std::vector<uint8_t>& residency_seen) const {
    std::vector<uint8_t> entry_state(entries_.end(), 0);  // 1: free, 2: in the table
    size_t free_count = 0;
    entries_.each_free([&](uint32_t entry) {
        entry_state[entry] = 1;
        ++free_count;
    });
    if (free_count != entries_.end() - entries_.used()) return "the list of free entries has the wrong length";
    bool twice = false;
    const char* wrong = table_.check([&](uint32_t entry) {
        twice = twice || entry >= entry_state.size() || entry_state[entry] != 0;
        if (!twice) entry_state[entry] = 2;
    });
    if (wrong != nullptr) return wrong;
    if (twice) return "the table holds a free entry, or one twice";
    for (uint32_t number = 0; number < entries_.end(); ++number) {
        const std::string name = "entry " + std::to_string(number);
        if (entry_state[number] == 0) return name + " is in use but not in the table";
        if (entry_state[number] == 1) continue;
        const Entry& entry = entries_[number];
        if (find(entry.space, entry.hash, mixer_(entry.hash, entry.space)) != number) return name + " is not found";
        if (entry.first() == kNone) return name + " has no residency";
        uint32_t ready = 0, taken = 0;
        for (uint32_t at = entry.first(); at != kNone; at = residencies_[at].next) {
            const Residency& record = residencies_[at];
            if (at >= residency_seen.size() || residency_seen[at] != 0)
                return name + " lists a residency that is not its own";
            residency_seen[at] = 1;
            if (record.state == State::kFree || record.entry != number) return name + " lists a stranger";
            if (record.state == State::kDoomed) continue;
            if ((taken >> record.tier & 1) != 0) return name + " is in a tier twice";
            taken |= uint32_t{1} << record.tier;
            if (record.state == State::kReady) ready |= uint32_t{1} << record.tier;
        }
        if (ready != entry.tiers()) return name + ": its mask of tiers is wrong";
    }
    return {};
}

std::string Index::check() {
    const std::lock_guard lock(mutex_);
    std::vector<uint8_t> seen(residencies_.end(), 0);
    if (std::string broken = check_entries(seen); !broken.empty()) return broken;
    size_t free_count = 0;
    bool free_in_use = false;
    residencies_.each_free([&](uint32_t residency) {
        ++free_count;
        free_in_use = free_in_use || residencies_[residency].state != State::kFree || seen[residency] != 0;
    });
    if (free_in_use) return "a residency is in use and in the list of free ones";
    if (free_count != residencies_.end() - residencies_.used())
        return "the list of free residencies has the wrong length";
    uint64_t ready[kTierCount] = {}, pending = 0, doomed = 0, pins = 0;
    for (uint32_t residency = 0; residency < residencies_.end(); ++residency) {
        const Residency& record = residencies_[residency];
        if (record.state == State::kFree) continue;
        if (seen[residency] == 0) return "residency " + std::to_string(residency) + " is in no entry's list";
        if (std::string broken = check_residency(residency); !broken.empty()) return broken;
        pins += record.pins;
        if (record.state == State::kReady) ++ready[record.tier];
        if (record.state == State::kPending) ++pending;
        if (record.state == State::kDoomed) ++doomed;
    }
    if (!std::equal(ready, ready + kTierCount, ready_)) return "a count of ready residencies is wrong";
    if (pins != pins_) return "the count of pins is wrong";
    if (doomed != doomed_) return "the count of doomed residencies is wrong";
    if (pending != pending_.size() - pending_free_.size()) return "the count of pending blocks is wrong";
    std::unordered_map<uint32_t, uint64_t> leased;
    for (const auto& [number, lease] : leases_) {
        for (const uint32_t handle : lease.handles) {
            if (!pinned(handle)) return "lease " + std::to_string(number) + " holds a residency that is not pinned";
            if (++leased[handle] > residencies_[handle].pins) return "leases hold more pins than a residency has";
        }
    }
    return order_.check();
}

}  // namespace tierkv
