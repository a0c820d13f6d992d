// Leases, and the ending of what has a deadline.
#include <algorithm>

#include "checks.hpp"
#include "index.hpp"

namespace tierkv {
namespace {

// How far a loop over handles fetches ahead.
constexpr size_t kAhead = 16;

}  // namespace

uint64_t Index::lease(double deadline) {
    check_deadline(deadline);
    const std::lock_guard lock(mutex_);
    leases_[last_lease_ + 1].deadline = deadline;
    return ++last_lease_;
}

void Index::lease_add(uint64_t lease, uint32_t space, HashSpan hashes, std::span<const uint8_t> tier_order,
                      std::span<uint8_t> tiers) {
    check_order(tier_order);
    const std::lock_guard lock(mutex_);
    const auto found = leases_.find(lease);
    if (found == leases_.end()) {
        std::fill(tiers.begin(), tiers.end(), kNoTier);
        return;
    }
    std::vector<uint32_t>& held = found->second.handles;
    const size_t before = held.size();
    std::vector<uint32_t> unused(hashes.count);
    find_all(space, hashes);
    held.resize(before + hashes.count);
    const std::span<uint32_t> handles(held.data() + before, hashes.count);
    acquire_found(tier_order, {tiers, unused, unused, handles});
    held.erase(std::remove(held.begin() + static_cast<ptrdiff_t>(before), held.end(), kNoSlot), held.end());
}

bool Index::lease_extend(uint64_t lease, double deadline) {
    check_deadline(deadline);
    const std::lock_guard lock(mutex_);
    const auto found = leases_.find(lease);
    if (found == leases_.end()) return false;
    found->second.deadline = deadline;
    return true;
}

void Index::end_lease(std::unordered_map<uint64_t, Lease>::iterator lease) {
    const std::vector<uint32_t>& handles = lease->second.handles;
    for (size_t k = 0; k < handles.size(); ++k) {
        if (k + kAhead < handles.size()) residencies_.prefetch(handles[k + kAhead]);
        unpin(handles[k]);
    }
    leases_.erase(lease);
}

bool Index::lease_release(uint64_t lease) {
    const std::lock_guard lock(mutex_);
    const auto found = leases_.find(lease);
    if (found == leases_.end()) return false;
    end_lease(found);
    return true;
}

std::pair<size_t, size_t> Index::expire(double now) {
    check_deadline(now);
    const std::lock_guard lock(mutex_);
    std::pair<size_t, size_t> ended{0, 0};
    for (auto at = leases_.begin(); at != leases_.end();) {
        const auto lease = at++;
        if (lease->second.deadline > now) continue;
        end_lease(lease);
        ++ended.first;
    }
    for (const Pending& pending : pending_) {
        if (pending.residency == kNone || pending.deadline > now) continue;
        doom(pending.residency);
        ++ended.second;
    }
    return ended;
}

}  // namespace tierkv
