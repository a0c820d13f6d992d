#include "record_pool.hpp"

#include <sys/mman.h>

#include <algorithm>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace tierkv {
namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;
constexpr size_t kFirstBytes = size_t{64} << 10;

size_t round_up(size_t bytes, size_t step) {
    return (bytes + step - 1) / step * step;
}

}  // namespace

VirtualRegion::VirtualRegion(size_t limit_bytes) {
    // Addresses without access cost no memory. Where their number is limited (RLIMIT_AS), take what can be had.
    for (size_t bytes = round_up(limit_bytes, kHugePageBytes); bytes >= kHugePageBytes; bytes /= 2) {
        void* mapping =
            mmap(nullptr, bytes + kHugePageBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (mapping == MAP_FAILED) continue;
        mapping_ = static_cast<std::byte*>(mapping);
        mapping_bytes_ = bytes + kHugePageBytes;
        base_ = mapping_ +
                (round_up(reinterpret_cast<uintptr_t>(mapping), kHugePageBytes) - reinterpret_cast<uintptr_t>(mapping));
        limit_bytes_ = bytes / kHugePageBytes * kHugePageBytes;
        return;
    }
    throw std::bad_alloc();
}

VirtualRegion::~VirtualRegion() {
    munmap(mapping_, mapping_bytes_);
}

void VirtualRegion::grow(size_t bytes) {
    if (bytes <= usable_bytes_) return;
    if (bytes > limit_bytes_) throw std::bad_alloc();
    // Small pools double on small pages; from 2 MiB on they grow by whole huge pages.
    size_t target =
        std::max({round_up(bytes, kFirstBytes), kFirstBytes, 2 * std::min(usable_bytes_, kHugePageBytes / 2)});
    if (target > kHugePageBytes / 2) target = round_up(bytes, kHugePageBytes);
    target = std::min(target, limit_bytes_);
    if (mprotect(base_ + usable_bytes_, target - usable_bytes_, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
    // Only advice: without huge pages everything works, more slowly.
    if (target >= kHugePageBytes) madvise(base_, target, MADV_HUGEPAGE);
    usable_bytes_ = target;
}

void VirtualRegion::populate(std::span<std::byte> range) {
    // Small ranges are not worth a call.
    if (range.size() >= kHugePageBytes / 2) madvise(range.data(), range.size(), MADV_POPULATE_WRITE);
}

}  // namespace tierkv
