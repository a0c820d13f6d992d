// Copies, checksums and pattern fills of batches of memory ranges on a few threads.
//
// Thread safety: every method may be called from several threads at once; the calls share the workers. The caller
// owns all memory and keeps it valid until the call returns. A call is cut into chunks by bytes; workers and the caller
// take chunks until none is left, so one large block is shared and many small blocks are spread. Batches below
// kSmallBytes run on the caller alone, since waking a thread costs more than copying them.
//
// Bad arguments throw std::invalid_argument before any byte is touched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace tierkv {

// A paged cache: piece j of block id b lies at bases[j] + b * strides[j] and is lengths[j] bytes long.
struct FragmentsView {
    std::span<const int64_t> bases;
    std::span<const int64_t> strides;
    std::span<const int64_t> lengths;
    std::span<const int64_t> block_ids;
};

class CopyPool {
  public:
    static constexpr size_t kSmallBytes = 256 * 1024;

    // `threads`: 1 to 64, the caller's included.
    explicit CopyPool(unsigned threads);
    ~CopyPool();
    CopyPool(const CopyPool&) = delete;
    CopyPool& operator=(const CopyPool&) = delete;

    // The pieces of block i, one behind the other, to destinations[i]; `checksums` is empty or gets the crc32c of each
    // block.
    void gather(const FragmentsView& fragments, std::span<const int64_t> destinations, std::span<uint32_t> checksums);
    void scatter(const FragmentsView& fragments, std::span<const int64_t> sources);
    void copy(std::span<const int64_t> destinations, std::span<const int64_t> sources,
              std::span<const int64_t> lengths);
    void checksum(std::span<const int64_t> addresses, std::span<const int64_t> lengths, std::span<uint32_t> checksums);

    // Range i is the little-endian output of splitmix64 seeded with seeds[i]; a last partial word is cut short.
    void fill(std::span<const int64_t> addresses, std::span<const int64_t> lengths, std::span<const uint64_t> seeds);
    // differs[i] becomes 1 where range i is not what fill() writes, else 0.
    void differ(std::span<const int64_t> addresses, std::span<const int64_t> lengths, std::span<const uint64_t> seeds,
                std::span<uint8_t> differs);

    // Makes the kernel map every page of the range, writable, without changing its content; others may use the memory
    // meanwhile. Throws std::bad_alloc where the kernel has no memory for it or the range is not mapped.
    void touch(int64_t address, int64_t length, int64_t page_bytes);

    // Ends the workers; calls that are under way finish, later ones run on the caller's thread. Idempotent.
    void close();

  private:
    class Workers;
    std::unique_ptr<Workers> workers_;
};

}  // namespace tierkv
