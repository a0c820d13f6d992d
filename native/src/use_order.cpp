#include "use_order.hpp"

#include <algorithm>

namespace tierkv {

UseOrder::List& UseOrder::list_of(const Residency& record) {
    std::vector<List>& lists = lists_[record.tier];
    if (lists.size() <= record.size_class) lists.resize(size_t{record.size_class} + 1);
    return lists[record.size_class];
}

void UseOrder::unlink(List& list, uint32_t residency) {
    const Residency& record = residencies_[residency];
    (record.newer == kNone ? list.newest : residencies_[record.newer].older) = record.older;
    (record.older == kNone ? list.oldest : residencies_[record.older].newer) = record.newer;
    --list.listed;
}

// One entry of the heap has become stale; sweeps them out before they outnumber the others.
void UseOrder::leave_heap(List& list) {
    --list.returned;
    if (list.heap.size() <= 2 * list.returned + 64) return;
    std::erase_if(list.heap, [this](const Returned& entry) { return stale(entry); });
    std::make_heap(list.heap.begin(), list.heap.end());
}

void UseOrder::take_out(List& list, uint32_t residency) {
    Residency& record = residencies_[residency];
    const Place place = record.place();
    record.set_place(Place::kNowhere);
    if (place == Place::kListed) unlink(list, residency);
    if (place == Place::kParked) --list.parked;
    if (place == Place::kReturned) leave_heap(list);
}

void UseOrder::use(uint32_t residency) {
    Residency& record = residencies_[residency];
    List& list = list_of(record);
    take_out(list, residency);
    record.order = clock_++;
    record.newer = kNone;
    record.older = list.newest;
    (list.newest == kNone ? list.oldest : residencies_[list.newest].newer) = residency;
    list.newest = residency;
    ++list.listed;
    record.set_place(Place::kListed);
}

void UseOrder::remove(uint32_t residency) {
    take_out(list_of(residencies_[residency]), residency);
}

void UseOrder::park(uint32_t residency) {
    Residency& record = residencies_[residency];
    List& list = list_of(record);
    // Room for its return is made now, so that releasing a pin cannot run out of memory.
    const size_t needed = list.heap.size() + list.parked + 1;
    if (list.heap.capacity() < needed) list.heap.reserve(std::max(needed, 2 * list.heap.capacity()));
    if (record.place() == Place::kReturned) {
        // Only ever the top: its entry goes with it.
        std::pop_heap(list.heap.begin(), list.heap.end());
        list.heap.pop_back();
        --list.returned;
    } else {
        unlink(list, residency);
    }
    ++list.parked;
    record.set_place(Place::kParked);
}

void UseOrder::unpinned(uint32_t residency) {
    Residency& record = residencies_[residency];
    if (record.place() != Place::kParked) return;
    List& list = list_of(record);
    --list.parked;
    ++list.returned;
    record.set_place(Place::kReturned);
    list.heap.push_back({record.order, residency});
    std::push_heap(list.heap.begin(), list.heap.end());
}

uint32_t UseOrder::oldest_unpinned(uint32_t tier, uint32_t size_class) {
    if (lists_[tier].size() <= size_class) return kNone;
    List& list = lists_[tier][size_class];
    while (!list.heap.empty()) {
        const Returned top = list.heap.front();
        if (stale(top)) {
            std::pop_heap(list.heap.begin(), list.heap.end());
            list.heap.pop_back();
        } else if (residencies_[top.residency].pins != 0) {
            park(top.residency);
        } else {
            return top.residency;
        }
    }
    while (list.oldest != kNone) {
        if (residencies_[list.oldest].pins == 0) return list.oldest;
        park(list.oldest);
    }
    return kNone;
}

void UseOrder::prefetch_neighbours(uint32_t residency) const {
    const Residency& record = residencies_[residency];
    if (record.place() != Place::kListed) return;
    if (record.newer != kNone) residencies_.prefetch(record.newer);
    if (record.older != kNone) residencies_.prefetch(record.older);
}

size_t UseOrder::bytes() const {
    size_t total = 0;
    for (const std::vector<List>& lists : lists_) {
        total += lists.capacity() * sizeof(List);
        for (const List& list : lists) total += list.heap.capacity() * sizeof(Returned);
    }
    return total;
}

std::string UseOrder::check() const {
    std::array<std::vector<std::array<uint64_t, 3>>, kTierCount> found;  // listed, parked, returned
    for (uint32_t tier = 0; tier < kTierCount; ++tier) found[tier].resize(lists_[tier].size());
    for (uint32_t residency = 0; residency < residencies_.end(); ++residency) {
        const Residency& record = residencies_[residency];
        if (record.state != State::kReady) continue;
        const std::string name = "residency " + std::to_string(residency);
        if (record.place() == Place::kNowhere) return name + " is ready but has no place in the order of use";
        if (record.size_class >= lists_[record.tier].size()) return name + " is of a class without a list";
        if (record.order >= clock_) return name + " was used in the future";
        ++found[record.tier][record.size_class][record.place_bits - 1u];
        const List& list = lists_[record.tier][record.size_class];
        if (record.place() == Place::kListed) continue;
        if (record.place() == Place::kParked && record.pins == 0) return name + " is parked without a pin";
        if (list.oldest != kNone && record.order > residencies_[list.oldest].order) {
            return name + " is parked or returned but newer than a listed one";
        }
    }
    for (uint32_t tier = 0; tier < kTierCount; ++tier) {
        for (size_t size_class = 0; size_class < lists_[tier].size(); ++size_class) {
            const List& list = lists_[tier][size_class];
            const std::string name = "list of tier " + std::to_string(tier) + ", class " + std::to_string(size_class);
            const auto& [listed, parked, returned] = found[tier][size_class];
            if (listed != list.listed || parked != list.parked || returned != list.returned) {
                return name + ": its counts are wrong";
            }
            uint64_t live = 0;
            for (const Returned& entry : list.heap) live += !stale(entry);
            if (live != returned) return name + ": a returned residency is not in the heap, or twice";
            if (!std::is_heap(list.heap.begin(), list.heap.end())) return name + ": the heap is out of order";
            if (list.heap.capacity() < list.heap.size() + list.parked)
                return name + ": no room for the parked to return";
            uint64_t walked = 0;
            uint32_t newer = kNone;
            for (uint32_t at = list.newest; at != kNone; newer = at, at = residencies_[at].older) {
                const Residency& record = residencies_[at];
                if (record.state != State::kReady || record.place() != Place::kListed)
                    return name + ": holds a stranger";
                if (record.tier != tier || record.size_class != size_class)
                    return name + ": holds another list's residency";
                if (record.newer != newer) return name + ": its links disagree";
                if (newer != kNone && record.order >= residencies_[newer].order) return name + ": it is out of order";
                if (++walked > listed) return name + ": it is longer than its count";
            }
            if (walked != listed || list.oldest != newer) return name + ": its end is wrong";
        }
    }
    return {};
}

}  // namespace tierkv
