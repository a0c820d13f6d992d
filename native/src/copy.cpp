#include "copy.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "checksum.hpp"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace tierkv {
namespace {

constexpr uint64_t kLeastChunkBytes = 256 * 1024;
constexpr uint64_t kMostChunkBytes = 4 * 1024 * 1024;
// Copying and summing alternate in steps that stay in the first caches, so that the sum costs no memory traffic.
constexpr uint64_t kFusedBytes = 32 * 1024;
// More than any address space: a sum of that many lengths cannot overflow unnoticed.
constexpr int64_t kMostLength = int64_t{1} << 48;

[[noreturn]] void refuse(const std::string& message) {
    throw std::invalid_argument(message);
}

// Plain memcpy: for pieces of any size and on any kind of page it was measured faster than vector loops with temporal
// or non-temporal stores.
inline void move_bytes(int64_t destination, int64_t source, uint64_t length) {
    std::memcpy(reinterpret_cast<void*>(destination), reinterpret_cast<const void*>(source), length);
}

inline uint32_t sum_bytes(int64_t address, uint64_t length, uint32_t value) {
    return crc32c(reinterpret_cast<const void*>(address), length, value);
}

void check_range(const char* what, size_t position, int64_t address, int64_t length) {
    if (length < 0 || length > kMostLength) {
        refuse(std::string(what) + " " + std::to_string(position) + ": a length of " + std::to_string(length) +
               " bytes is out of range");
    }
    int64_t end = 0;
    if (length != 0 && (address <= 0 || __builtin_add_overflow(address, length, &end))) {
        refuse(std::string(what) + " " + std::to_string(position) + ": " + std::to_string(length) +
               " bytes at address " + std::to_string(address) + " are no memory");
    }
}

void check_count(const char* what, size_t count, size_t expected) {
    if (count != expected) {
        refuse(std::string(what) + ": expected " + std::to_string(expected) + " entries, got " + std::to_string(count));
    }
}

// A share of a batch: `count` whole items from `first`, or `length` bytes at `offset` of one item.
struct Chunk {
    size_t first = 0;
    size_t count = 0;
    uint64_t offset = 0;
    uint64_t length = 0;
    bool whole = true;
};

// Cuts items into chunks of about `chunk_bytes`, each of which is a multiple of kLeastChunkBytes where an item is
// split.
template <typename LengthOf>
std::vector<Chunk> cut(size_t items, uint64_t total, unsigned threads, LengthOf length_of) {
    std::vector<Chunk> chunks;
    if (items == 0) return chunks;
    if (total < CopyPool::kSmallBytes || threads == 1) {
        chunks.push_back({0, items, 0, 0, true});
        return chunks;
    }
    uint64_t chunk_bytes = std::clamp(total / (uint64_t{threads} * 8), kLeastChunkBytes, kMostChunkBytes);
    chunk_bytes -= chunk_bytes % kLeastChunkBytes;
    chunks.reserve(total / chunk_bytes + 2);
    Chunk open{};
    uint64_t open_bytes = 0;
    const auto flush = [&] {
        if (open.count != 0) chunks.push_back(open);
        open = Chunk{};
        open_bytes = 0;
    };
    for (size_t item = 0; item < items; ++item) {
        const uint64_t length = length_of(item);
        if (length >= 2 * chunk_bytes) {
            flush();
            uint64_t offset = 0;
            // The last part takes the remainder, so that no part is tiny.
            for (; length - offset >= 2 * chunk_bytes; offset += chunk_bytes) {
                chunks.push_back({item, 1, offset, chunk_bytes, false});
            }
            chunks.push_back({item, 1, offset, length - offset, false});
            continue;
        }
        if (open.count == 0) open.first = item;
        ++open.count;
        open_bytes += length;
        if (open_bytes >= chunk_bytes) flush();
    }
    flush();
    return chunks;
}

// One call's chunks, on the caller's stack. `run` does not throw.
struct Work {
    void (*run)(void* context, size_t chunk);
    void* context;
    size_t chunks;
    std::atomic<size_t> next{0};
    unsigned helpers = 0;  // workers inside; guarded by the pool's mutex
    std::condition_variable idle;

    bool exhausted() const { return next.load(std::memory_order_relaxed) >= chunks; }

    void take_chunks() {
        for (;;) {
            const size_t chunk = next.fetch_add(1, std::memory_order_relaxed);
            if (chunk >= chunks) return;
            run(context, chunk);
        }
    }
};

constexpr uint64_t kGamma = 0x9E3779B97F4A7C15;  // splitmix64's increment: the golden ratio

inline uint64_t splitmix64_output(uint64_t state) {
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9;
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB;
    return state ^ (state >> 31);
}

inline uint64_t little_endian(uint64_t word) {
    if constexpr (std::endian::native == std::endian::big) return __builtin_bswap64(word);
    return word;
}

// The word that follows `offset` bytes (a multiple of 8) of the sequence.
inline uint64_t word_after(uint64_t seed, uint64_t offset) {
    return little_endian(splitmix64_output(seed + (offset / 8 + 1) * kGamma));
}

void fill_range(int64_t address, uint64_t offset, uint64_t length, uint64_t seed) {
    auto* to = reinterpret_cast<uint8_t*>(address) + offset;
    const uint64_t whole = length - length % 8;
    uint64_t state = seed + (offset / 8) * kGamma;
    for (uint64_t done = 0; done < whole; done += 8) {
        state += kGamma;
        const uint64_t word = little_endian(splitmix64_output(state));
        std::memcpy(to + done, &word, sizeof word);
    }
    if (whole != length) {
        const uint64_t word = word_after(seed, offset + whole);
        std::memcpy(to + whole, &word, length - whole);
    }
}

bool range_differs(int64_t address, uint64_t offset, uint64_t length, uint64_t seed) {
    const auto* from = reinterpret_cast<const uint8_t*>(address) + offset;
    const uint64_t whole = length - length % 8;
    uint64_t state = seed + (offset / 8) * kGamma;
    for (uint64_t done = 0; done < whole;) {
        const uint64_t end = std::min(whole, done + 4096);
        uint64_t difference = 0;
        for (; done < end; done += 8) {
            state += kGamma;
            uint64_t word;
            std::memcpy(&word, from + done, sizeof word);
            difference |= word ^ little_endian(splitmix64_output(state));
        }
        if (difference != 0) return true;
    }
    if (whole == length) return false;
    const uint64_t word = word_after(seed, offset + whole);
    return std::memcmp(from + whole, &word, length - whole) != 0;
}

// Where the pieces of a block begin within it, its length last.
std::vector<uint64_t> piece_starts(const FragmentsView& fragments) {
    std::vector<uint64_t> starts(fragments.lengths.size() + 1, 0);
    for (size_t piece = 0; piece < fragments.lengths.size(); ++piece) {
        starts[piece + 1] = starts[piece] + static_cast<uint64_t>(fragments.lengths[piece]);
    }
    return starts;
}

void check_fragments(const FragmentsView& fragments, const char* what, std::span<const int64_t> slots) {
    const size_t pieces = fragments.bases.size();
    check_count("strides", fragments.strides.size(), pieces);
    check_count("lengths", fragments.lengths.size(), pieces);
    check_count(what, slots.size(), fragments.block_ids.size());
    if (pieces > 1'000'000) refuse("a block of more than a million pieces");
    int64_t block_bytes = 0;
    for (size_t piece = 0; piece < pieces; ++piece) {
        check_range("piece", piece, 1, fragments.lengths[piece]);
        block_bytes += fragments.lengths[piece];
        if (block_bytes > kMostLength) refuse("the pieces of a block are longer than any memory");
    }
    if (fragments.block_ids.empty()) return;
    // A piece's address is linear in the block's number, so the extremes speak for all.
    const auto [least, most] = std::minmax_element(fragments.block_ids.begin(), fragments.block_ids.end());
    for (size_t piece = 0; piece < pieces; ++piece) {
        for (const int64_t block : {*least, *most}) {
            int64_t address = 0;
            if (__builtin_mul_overflow(block, fragments.strides[piece], &address) ||
                __builtin_add_overflow(address, fragments.bases[piece], &address)) {
                refuse("piece " + std::to_string(piece) + " of block " + std::to_string(block) +
                       ": its address does not fit in 64 bits");
            }
            check_range("piece", piece, address, fragments.lengths[piece]);
        }
    }
    for (size_t block = 0; block < slots.size(); ++block) check_range(what, block, slots[block], block_bytes);
}

// Walks `length` bytes at `offset` of a block, piece by piece. kGather: cache -> slot, else slot -> cache; with kSum it
// returns the crc32c of these bytes.
template <bool kGather, bool kSum>
uint32_t move_block(const FragmentsView& fragments, const std::vector<uint64_t>& starts, size_t block, int64_t slot,
                    uint64_t offset, uint64_t length) {
    uint32_t sum = 0;
    const int64_t id = fragments.block_ids[block];
    const uint64_t end = offset + length;
    size_t piece = static_cast<size_t>(std::upper_bound(starts.begin(), starts.end(), offset) - starts.begin()) - 1;
    while (offset < end) {
        const uint64_t inside = offset - starts[piece];
        const uint64_t run = std::min(end, starts[piece + 1]) - offset;
        const int64_t cache = fragments.bases[piece] + id * fragments.strides[piece] + static_cast<int64_t>(inside);
        const int64_t there = slot + static_cast<int64_t>(offset);
        if constexpr (kSum) {
            for (uint64_t done = 0; done < run;) {
                const uint64_t step = std::min(kFusedBytes, run - done);
                const int64_t at = static_cast<int64_t>(done);
                move_bytes(there + at, cache + at, step);
                // Of the copy, not of the source: the sum then speaks for the bytes that are kept.
                sum = sum_bytes(there + at, step, sum);
                done += step;
            }
        } else if constexpr (kGather) {
            move_bytes(there, cache, run);
        } else {
            move_bytes(cache, there, run);
        }
        offset += run;
        ++piece;
    }
    return sum;
}

}  // namespace

class CopyPool::Workers {
  public:
    explicit Workers(unsigned threads) : threads_(threads), process_(getpid()) {
        workers_.reserve(threads - 1);
        try {
            for (unsigned k = 1; k < threads; ++k) workers_.emplace_back([this] { serve(); });
        } catch (...) {
            close();
            throw;
        }
    }

    ~Workers() { close(); }
    Workers(const Workers&) = delete;
    Workers& operator=(const Workers&) = delete;

    unsigned threads() const { return threads_; }

    // Calls run(chunk) for each chunk number below `chunks`, in any order, on any of the threads.
    template <typename Run>
    void each(size_t chunks, Run&& run) {
        const auto call = [](void* context, size_t chunk) {
            (*static_cast<std::remove_reference_t<Run>*>(context))(chunk);
        };
        Work work{call, &run, chunks, {}, 0, {}};
        // After fork() the child has no workers, and the mutex may be held by a thread that it does not have.
        if (chunks <= 1 || threads_ == 1 || process_ != getpid()) {
            work.take_chunks();
            return;
        }
        size_t wanted = 0;
        bool everyone = false;  // decided under the mutex: close() empties workers_
        {
            const std::lock_guard lock(mutex_);
            if (!stopping_) {
                waiting_.push_back(&work);
                wanted = std::min(chunks - 1, workers_.size());
                everyone = wanted == workers_.size();
            }
        }
        if (everyone) {
            wake_.notify_all();
        } else {
            for (; wanted != 0; --wanted) wake_.notify_one();
        }
        work.take_chunks();
        std::unique_lock lock(mutex_);
        std::erase(waiting_, &work);
        work.idle.wait(lock, [&] { return work.helpers == 0; });
    }

    void close() {
        if (process_ != getpid()) {
            // The threads belong to the parent; joining them here would never end.
            for (std::thread& worker : workers_) worker.detach();
            workers_.clear();
            return;
        }
        const std::lock_guard closing(close_mutex_);
        {
            const std::lock_guard lock(mutex_);
            stopping_ = true;
        }
        wake_.notify_all();
        for (std::thread& worker : joinable()) worker.join();
    }

  private:
    // Takes the threads out of workers_, which calls read under the mutex.
    std::vector<std::thread> joinable() {
        const std::lock_guard lock(mutex_);
        return std::exchange(workers_, {});
    }

    void serve() {
        std::unique_lock lock(mutex_);
        for (;;) {
            wake_.wait(lock, [&] { return stopping_ || !waiting_.empty(); });
            if (waiting_.empty()) return;
            Work* work = waiting_.front();
            waiting_.pop_front();
            if (work->exhausted()) continue;
            // Back to the end of the queue: several callers share the workers in turn.
            waiting_.push_back(work);
            ++work->helpers;
            lock.unlock();
            work->take_chunks();
            lock.lock();
            std::erase(waiting_, work);
            if (--work->helpers == 0) work->idle.notify_one();
        }
    }

    const unsigned threads_;
    const pid_t process_;
    std::mutex close_mutex_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::deque<Work*> waiting_;  // calls that may still have chunks; at most one a calling thread
    bool stopping_ = false;
    std::vector<std::thread> workers_;
};

namespace {

unsigned checked_threads(unsigned threads) {
    if (threads < 1 || threads > 64) refuse("threads must be within 1..64, got " + std::to_string(threads));
    return threads;
}

}  // namespace

CopyPool::CopyPool(unsigned threads) : workers_(std::make_unique<Workers>(checked_threads(threads))) {}
CopyPool::~CopyPool() = default;
void CopyPool::close() {
    workers_->close();
}

void CopyPool::gather(const FragmentsView& fragments, std::span<const int64_t> destinations,
                      std::span<uint32_t> checksums) {
    check_fragments(fragments, "destinations", destinations);
    if (!checksums.empty()) check_count("checksums", checksums.size(), destinations.size());
    const std::vector<uint64_t> starts = piece_starts(fragments);
    const uint64_t block_bytes = starts.back();
    const size_t blocks = destinations.size();
    const std::vector<Chunk> chunks =
        cut(blocks, block_bytes * blocks, workers_->threads(), [&](size_t) { return block_bytes; });
    if (checksums.empty()) {
        workers_->each(chunks.size(), [&](size_t number) {
            const Chunk& chunk = chunks[number];
            for (size_t block = chunk.first; block < chunk.first + chunk.count; ++block) {
                move_block<true, false>(fragments, starts, block, destinations[block], chunk.offset,
                                        chunk.whole ? block_bytes : chunk.length);
            }
        });
        return;
    }
    std::vector<uint32_t> partial(chunks.size(), 0);
    workers_->each(chunks.size(), [&](size_t number) {
        const Chunk& chunk = chunks[number];
        for (size_t block = chunk.first; block < chunk.first + chunk.count; ++block) {
            const uint32_t sum = move_block<true, true>(fragments, starts, block, destinations[block], chunk.offset,
                                                        chunk.whole ? block_bytes : chunk.length);
            if (chunk.whole) {
                checksums[block] = sum;
            } else {
                partial[number] = sum;
            }
        }
    });
    for (size_t number = 0; number < chunks.size(); ++number) {
        const Chunk& chunk = chunks[number];
        if (chunk.whole) continue;
        uint32_t& sum = checksums[chunk.first];
        sum = chunk.offset == 0 ? partial[number] : crc32c_combine(sum, partial[number], chunk.length);
    }
}

void CopyPool::scatter(const FragmentsView& fragments, std::span<const int64_t> sources) {
    check_fragments(fragments, "sources", sources);
    const std::vector<uint64_t> starts = piece_starts(fragments);
    const uint64_t block_bytes = starts.back();
    const std::vector<Chunk> chunks =
        cut(sources.size(), block_bytes * sources.size(), workers_->threads(), [&](size_t) { return block_bytes; });
    workers_->each(chunks.size(), [&](size_t number) {
        const Chunk& chunk = chunks[number];
        for (size_t block = chunk.first; block < chunk.first + chunk.count; ++block) {
            move_block<false, false>(fragments, starts, block, sources[block], chunk.offset,
                                     chunk.whole ? block_bytes : chunk.length);
        }
    });
}

namespace {

uint64_t check_ranges(const char* what, std::span<const int64_t> addresses, std::span<const int64_t> lengths) {
    check_count("lengths", lengths.size(), addresses.size());
    uint64_t total = 0;
    for (size_t k = 0; k < addresses.size(); ++k) {
        check_range(what, k, addresses[k], lengths[k]);
        total += static_cast<uint64_t>(lengths[k]);
    }
    return total;
}

std::vector<Chunk> cut_ranges(std::span<const int64_t> lengths, uint64_t total, unsigned threads) {
    return cut(lengths.size(), total, threads, [&](size_t item) { return static_cast<uint64_t>(lengths[item]); });
}

}  // namespace

void CopyPool::copy(std::span<const int64_t> destinations, std::span<const int64_t> sources,
                    std::span<const int64_t> lengths) {
    check_count("sources", sources.size(), destinations.size());
    const uint64_t total = check_ranges("destination", destinations, lengths);
    check_ranges("source", sources, lengths);
    const std::vector<Chunk> chunks = cut_ranges(lengths, total, workers_->threads());
    workers_->each(chunks.size(), [&](size_t number) {
        const Chunk& chunk = chunks[number];
        const int64_t offset = static_cast<int64_t>(chunk.offset);
        for (size_t k = chunk.first; k < chunk.first + chunk.count; ++k) {
            const uint64_t length = chunk.whole ? static_cast<uint64_t>(lengths[k]) : chunk.length;
            if (length != 0) move_bytes(destinations[k] + offset, sources[k] + offset, length);
        }
    });
}

void CopyPool::checksum(std::span<const int64_t> addresses, std::span<const int64_t> lengths,
                        std::span<uint32_t> checksums) {
    const uint64_t total = check_ranges("range", addresses, lengths);
    check_count("checksums", checksums.size(), addresses.size());
    const std::vector<Chunk> chunks = cut_ranges(lengths, total, workers_->threads());
    std::vector<uint32_t> partial(chunks.size(), 0);
    workers_->each(chunks.size(), [&](size_t number) {
        const Chunk& chunk = chunks[number];
        if (!chunk.whole) {
            partial[number] = sum_bytes(addresses[chunk.first] + static_cast<int64_t>(chunk.offset), chunk.length, 0);
            return;
        }
        for (size_t k = chunk.first; k < chunk.first + chunk.count; ++k) {
            checksums[k] = sum_bytes(addresses[k], static_cast<uint64_t>(lengths[k]), 0);
        }
    });
    for (size_t number = 0; number < chunks.size(); ++number) {
        const Chunk& chunk = chunks[number];
        if (chunk.whole) continue;
        uint32_t& sum = checksums[chunk.first];
        sum = chunk.offset == 0 ? partial[number] : crc32c_combine(sum, partial[number], chunk.length);
    }
}

void CopyPool::fill(std::span<const int64_t> addresses, std::span<const int64_t> lengths,
                    std::span<const uint64_t> seeds) {
    const uint64_t total = check_ranges("range", addresses, lengths);
    check_count("seeds", seeds.size(), addresses.size());
    const std::vector<Chunk> chunks = cut_ranges(lengths, total, workers_->threads());
    workers_->each(chunks.size(), [&](size_t number) {
        const Chunk& chunk = chunks[number];
        for (size_t k = chunk.first; k < chunk.first + chunk.count; ++k) {
            fill_range(addresses[k], chunk.offset, chunk.whole ? static_cast<uint64_t>(lengths[k]) : chunk.length,
                       seeds[k]);
        }
    });
}

void CopyPool::differ(std::span<const int64_t> addresses, std::span<const int64_t> lengths,
                      std::span<const uint64_t> seeds, std::span<uint8_t> differs) {
    const uint64_t total = check_ranges("range", addresses, lengths);
    check_count("seeds", seeds.size(), addresses.size());
    check_count("differs", differs.size(), addresses.size());
    std::fill(differs.begin(), differs.end(), uint8_t{0});
    const std::vector<Chunk> chunks = cut_ranges(lengths, total, workers_->threads());
    std::vector<uint8_t> partial(chunks.size(), 0);
    workers_->each(chunks.size(), [&](size_t number) {
        const Chunk& chunk = chunks[number];
        for (size_t k = chunk.first; k < chunk.first + chunk.count; ++k) {
            const bool different = range_differs(
                addresses[k], chunk.offset, chunk.whole ? static_cast<uint64_t>(lengths[k]) : chunk.length, seeds[k]);
            if (chunk.whole) {
                differs[k] = different;
            } else {
                partial[number] = different;
            }
        }
    });
    for (size_t number = 0; number < chunks.size(); ++number) {
        if (!chunks[number].whole) differs[chunks[number].first] |= partial[number];
    }
}

void CopyPool::touch(int64_t address, int64_t length, int64_t page_bytes) {
    check_range("range", 0, address, length);
    if (page_bytes < 1) refuse("page_bytes must be 1 or more, got " + std::to_string(page_bytes));
    if (length == 0) return;
    const auto page = static_cast<uint64_t>(page_bytes);
    const auto system_page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    const auto first = static_cast<uint64_t>(address);
    const uint64_t last = first + static_cast<uint64_t>(length);
    const uint64_t step = std::max(page, kMostChunkBytes - kMostChunkBytes % page);
    const uint64_t origin = first - first % page;
    std::atomic<bool> refused{false};
    workers_->each((last - origin + step - 1) / step, [&](size_t number) {
        if (refused.load(std::memory_order_relaxed)) return;
        const uint64_t begin = std::max(first, origin + number * step);
        const uint64_t end = std::min(last, origin + (number + 1) * step);
        const uint64_t aligned = begin - begin % system_page;
        // One call of the kernel instead of a fault a page; it does not change the content.
        if (madvise(reinterpret_cast<void*>(aligned), end - aligned, MADV_POPULATE_WRITE) == 0) return;
        if (errno == ENOMEM || errno == EFAULT) {
            refused.store(true, std::memory_order_relaxed);  // touching such a page would be a fatal signal
            return;
        }
        // An older kernel, or memory of a device: replace a byte of each page by itself. A failed exchange means that
        // another thread wrote there meanwhile, which maps the page as well.
        for (uint64_t at = begin; at < end; at += page - at % page) {
            auto* byte = reinterpret_cast<uint8_t*>(at);
            uint8_t value = __atomic_load_n(byte, __ATOMIC_RELAXED);
            __atomic_compare_exchange_n(byte, &value, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
        }
    });
    if (refused.load()) throw std::bad_alloc();
}

}  // namespace tierkv
