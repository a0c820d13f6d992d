// Memory that grows without moving: a range of addresses is reserved once and made usable step by step.
//
// Growth never copies and never invalidates a pointer, records are named by 32-bit numbers, and big pools lie on huge
// pages. Memory is kept for reuse until the pool is destroyed. Not thread safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <span>
#include <type_traits>

namespace tierkv {

constexpr uint32_t kNone = 0xFFFF'FFFF;

class VirtualRegion {
  public:
    // Reserves addresses for up to `limit_bytes`, or for as much of it as the process may have.
    explicit VirtualRegion(size_t limit_bytes);
    ~VirtualRegion();
    VirtualRegion(const VirtualRegion&) = delete;
    VirtualRegion& operator=(const VirtualRegion&) = delete;

    std::byte* base() const { return base_; }
    size_t usable_bytes() const { return usable_bytes_; }
    // Makes at least the first `bytes` usable (zeroed when new); std::bad_alloc leaves everything as it was.
    void grow(size_t bytes);
    // What has become usable since the last call, for populate().
    std::span<std::byte> take_fresh() {
        const std::span<std::byte> fresh(base_ + fresh_from_, usable_bytes_ - fresh_from_);
        fresh_from_ = usable_bytes_;
        return fresh;
    }
    // Makes the kernel provide the memory now, not at the first write. Only a matter of time, so failures are ignored;
    // needs no lock, since it changes no content.
    static void populate(std::span<std::byte> range);

  private:
    std::byte* mapping_ = nullptr;
    size_t mapping_bytes_ = 0;
    std::byte* base_ = nullptr;
    size_t limit_bytes_ = 0;
    size_t usable_bytes_ = 0;
    size_t fresh_from_ = 0;
};

// Records of one type, numbered from 0. A free record's first four bytes hold the number of the next free one.
template <typename Record>
class RecordPool {
    static_assert(std::is_trivially_copyable_v<Record> && sizeof(Record) >= sizeof(uint32_t));

  public:
    explicit RecordPool(uint32_t limit) : region_(size_t{limit} * sizeof(Record)), limit_(limit) {
        records_ = reinterpret_cast<Record*>(region_.base());
    }

    Record& operator[](uint32_t number) { return records_[number]; }
    const Record& operator[](uint32_t number) const { return records_[number]; }
    // Every number ever given out is below this.
    uint32_t end() const { return end_; }
    uint32_t used() const { return end_ - free_count_; }
    size_t bytes() const { return region_.usable_bytes(); }

    // Makes sure that the next `count` calls of allocate() succeed.
    void ensure(size_t count) {
        if (count <= free_count_) return;
        const size_t needed = end_ + (count - free_count_);
        if (needed > limit_) throw std::bad_alloc();
        region_.grow(needed * sizeof(Record));
    }

    std::span<std::byte> take_fresh() { return region_.take_fresh(); }

    // A zeroed record.
    uint32_t allocate() {
        ensure(1);
        uint32_t number = free_;
        if (number != kNone) {
            std::memcpy(&free_, &records_[number], sizeof free_);
            --free_count_;
        } else {
            number = end_++;
        }
        std::memset(static_cast<void*>(&records_[number]), 0, sizeof(Record));
        return number;
    }

    void release(uint32_t number) {
        std::memcpy(static_cast<void*>(&records_[number]), &free_, sizeof free_);
        free_ = number;
        ++free_count_;
    }

    template <typename Visit>
    void each_free(Visit visit) const {
        for (uint32_t number = free_; number != kNone;) {
            visit(number);
            std::memcpy(&number, &records_[number], sizeof number);
        }
    }

    void prefetch(uint32_t number) const {
        const char* first = reinterpret_cast<const char*>(&records_[number]);
        __builtin_prefetch(first);
        __builtin_prefetch(first + sizeof(Record) - 1);  // a record may lie across two cache lines
    }

  private:
    VirtualRegion region_;
    Record* records_ = nullptr;
    const uint32_t limit_;
    uint32_t end_ = 0;
    uint32_t free_ = kNone;
    uint32_t free_count_ = 0;
};

}  // namespace tierkv
