// CopyPool: batches of all shapes on one to four threads against plain loops; several callers; closing.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "checksum.hpp"
#include "copy.hpp"

using namespace tierkv;
using tierkv::testing::refuses;

namespace {

int64_t address(const void* pointer) {
    return reinterpret_cast<int64_t>(pointer);
}

// A paged cache of several layers, each its own memory, and slots for its blocks.
struct Cache {
    std::vector<std::vector<uint8_t>> layers;
    std::vector<int64_t> bases, strides, lengths, block_ids;
    size_t block_bytes = 0;

    Cache(std::vector<int64_t> piece_lengths, size_t blocks, size_t used, uint32_t seed)
        : lengths(std::move(piece_lengths)) {
        std::mt19937 random(seed);
        for (const int64_t length : lengths) {
            const int64_t stride = length + static_cast<int64_t>(random() % 100);
            auto& layer = layers.emplace_back(static_cast<size_t>(stride) * blocks + 1);
            for (uint8_t& byte : layer) byte = static_cast<uint8_t>(random());
            bases.push_back(address(layer.data()));
            strides.push_back(stride);
            block_bytes += static_cast<size_t>(length);
        }
        std::vector<int64_t> ids(blocks);
        for (size_t k = 0; k < blocks; ++k) ids[k] = static_cast<int64_t>(k);
        std::shuffle(ids.begin(), ids.end(), random);
        block_ids.assign(ids.begin(), ids.begin() + static_cast<ptrdiff_t>(used));
    }
    FragmentsView view() const { return {bases, strides, lengths, block_ids}; }
    // Block k of the batch, gathered by hand.
    std::vector<uint8_t> block(size_t k) const {
        std::vector<uint8_t> bytes;
        for (size_t piece = 0; piece < bases.size(); ++piece) {
            const auto* from = reinterpret_cast<const uint8_t*>(bases[piece] + strides[piece] * block_ids[k]);
            bytes.insert(bytes.end(), from, from + lengths[piece]);
        }
        return bytes;
    }
};

struct Slots {
    std::vector<uint8_t> memory;
    std::vector<int64_t> addresses;
    Slots(size_t count, size_t bytes) : memory(count * (bytes + 16), 0xEE) {
        for (size_t k = 0; k < count; ++k) addresses.push_back(address(memory.data() + k * (bytes + 16) + 8));
    }
};

const std::vector<std::pair<std::vector<int64_t>, size_t>>& shapes() {
    // Pieces of a block, blocks: few bytes, many pieces, blocks smaller and larger than a chunk, one large block.
    static const std::vector<std::pair<std::vector<int64_t>, size_t>> list = {
        {{1}, 1},
        {{7, 9, 3}, 50},
        {std::vector<int64_t>(64, 1000), 40},
        {{300'000, 5, 0, 40'000}, 9},
        {{3'000'000, 1'234'567}, 2},
        {{0}, 3},
    };
    return list;
}

}  // namespace

TEST(gather_and_scatter) {
    for (const unsigned threads : {1u, 2u, 4u}) {
        CopyPool pool(threads);
        uint32_t seed = 0;
        for (const auto& [pieces, count] : shapes()) {
            Cache cache(pieces, count * 2, count, ++seed);
            Slots plain(count, cache.block_bytes), summed(count, cache.block_bytes);
            std::vector<uint32_t> sums(count, 123);
            pool.gather(cache.view(), plain.addresses, {});
            pool.gather(cache.view(), summed.addresses, sums);
            CHECK(plain.memory == summed.memory);  // and nothing was written between the slots
            for (size_t k = 0; k < count; ++k) {
                const std::vector<uint8_t> expected = cache.block(k);
                CHECK(cache.block_bytes == 0 ||
                      std::memcmp(reinterpret_cast<void*>(plain.addresses[k]), expected.data(), expected.size()) == 0);
                CHECK(sums[k] == crc32c(expected.data(), expected.size()));
                CHECK(*reinterpret_cast<uint8_t*>(plain.addresses[k] + static_cast<int64_t>(cache.block_bytes)) ==
                      0xEE);
            }
            Cache other = cache;
            for (size_t piece = 0; piece < pieces.size(); ++piece) {
                std::fill(other.layers[piece].begin(), other.layers[piece].end(), uint8_t{0x55});
                other.bases[piece] = address(other.layers[piece].data());
            }
            pool.scatter(other.view(), plain.addresses);
            for (size_t k = 0; k < count; ++k) CHECK(other.block(k) == cache.block(k));
            // What is not of these blocks stayed.
            Cache untouched = other;
            for (size_t piece = 0; piece < pieces.size(); ++piece) {
                std::vector<uint8_t>& layer = untouched.layers[piece];
                for (const int64_t block : untouched.block_ids) {
                    std::fill_n(layer.begin() + block * untouched.strides[piece], untouched.lengths[piece],
                                uint8_t{0x55});
                }
                for (const uint8_t byte : layer) CHECK(byte == 0x55);
            }
        }
    }
}

TEST(copy_and_checksum) {
    std::mt19937 random(7);
    for (const unsigned threads : {1u, 3u}) {
        CopyPool pool(threads);
        std::vector<int64_t> lengths = {0, 1, 5'000'000, 77, 262'144, 524'288, 999'999, 0};
        for (int k = 0; k < 300; ++k) lengths.push_back(static_cast<int64_t>(random() % 5000));
        int64_t total = 0;
        std::vector<int64_t> offsets;
        for (const int64_t length : lengths) offsets.push_back(std::exchange(total, total + length));
        std::vector<uint8_t> from(static_cast<size_t>(total)), to(static_cast<size_t>(total));
        for (uint8_t& byte : from) byte = static_cast<uint8_t>(random());
        std::vector<int64_t> sources, destinations;
        for (const int64_t offset : offsets) {
            sources.push_back(address(from.data()) + offset);
            destinations.push_back(address(to.data()) + offset);
        }
        pool.copy(destinations, sources, lengths);
        CHECK(from == to);
        std::vector<uint32_t> sums(lengths.size());
        pool.checksum(sources, lengths, sums);
        for (size_t k = 0; k < lengths.size(); ++k) {
            CHECK(sums[k] == crc32c(from.data() + offsets[k], static_cast<size_t>(lengths[k])));
        }
    }
}

TEST(fill_and_differ) {
    CopyPool pool(3);
    const std::vector<int64_t> lengths = {8, 3, 0, 4'000'003, 65'536, 12'345};
    const std::vector<uint64_t> seeds = {0, 1, 2, 0xFFFF'FFFF'FFFF'FFFF, 42, 42};
    std::vector<std::vector<uint8_t>> ranges;
    std::vector<int64_t> addresses;
    for (const int64_t length : lengths) {
        ranges.emplace_back(static_cast<size_t>(length) + 1, uint8_t{9});
        addresses.push_back(address(ranges.back().data()));
    }
    pool.fill(addresses, lengths, seeds);
    // splitmix64's first output for seed 0.
    uint64_t word = 0;
    std::memcpy(&word, ranges[0].data(), 8);
    CHECK(word == 0xE220A8397B1DCDAF);
    CHECK(std::memcmp(ranges[4].data(), ranges[5].data(), 12'345) == 0);
    std::vector<uint8_t> differs(lengths.size(), 7);
    pool.differ(addresses, lengths, seeds, differs);
    CHECK(differs == std::vector<uint8_t>(lengths.size(), 0));
    std::mt19937 random(8);
    for (size_t k = 0; k < lengths.size(); ++k) {
        CHECK(ranges[k][static_cast<size_t>(lengths[k])] == 9);
        if (lengths[k] == 0) continue;
        for (int round = 0; round < 20; ++round) {
            const size_t at =
                round == 0 ? static_cast<size_t>(lengths[k]) - 1 : random() % static_cast<size_t>(lengths[k]);
            ranges[k][at] ^= 0x10;
            pool.differ(addresses, lengths, seeds, differs);
            for (size_t other = 0; other < lengths.size(); ++other) CHECK(differs[other] == (other == k));
            ranges[k][at] ^= 0x10;
        }
    }
}

TEST(bad_arguments_change_nothing) {
    CopyPool pool(2);
    CHECK(refuses([] { CopyPool none(0); }));
    CHECK(refuses([] { CopyPool many(65); }));
    Cache cache({100}, 4, 2, 1);
    Slots slots(2, 100);
    const std::vector<uint8_t> before = slots.memory;
    const std::vector<int64_t> one(1, slots.addresses[0]);
    CHECK(refuses([&] { pool.gather(cache.view(), one, {}); }));
    FragmentsView view = cache.view();
    const std::vector<int64_t> negative(1, -1), huge(1, INT64_MAX), zero(1, 0);
    view.lengths = negative;
    CHECK(refuses([&] { pool.gather(view, slots.addresses, {}); }));
    view.lengths = huge;
    CHECK(refuses([&] { pool.gather(view, slots.addresses, {}); }));
    view = cache.view();
    view.bases = zero;
    view.strides = zero;
    CHECK(refuses([&] { pool.gather(view, slots.addresses, {}); }));
    view = cache.view();
    view.strides = huge;
    CHECK(refuses([&] { pool.scatter(view, slots.addresses); }));
    std::vector<uint32_t> sums(1);
    CHECK(refuses([&] { pool.checksum(one, negative, sums); }));
    CHECK(refuses([&] { pool.checksum(zero, one, sums); }));
    const std::vector<int64_t> mixed = {slots.addresses[0], 0}, lengths = {10, 10};
    CHECK(refuses([&] { pool.copy(mixed, cache.bases, lengths); }));
    CHECK(refuses([&] { pool.copy(mixed, slots.addresses, lengths); }));
    CHECK(refuses([&] { pool.touch(slots.addresses[0], 10, 0); }));
    CHECK(slots.memory == before);
}

TEST(several_callers_share_the_workers) {
    CopyPool pool(3);
    std::vector<std::thread> callers;
    for (uint32_t caller = 0; caller < 4; ++caller) {
        callers.emplace_back([&pool, caller] {
            for (uint32_t round = 0; round < 12; ++round) {
                Cache cache({70'000, 50'000}, 12, 9, caller * 100 + round);
                Slots slots(9, cache.block_bytes);
                std::vector<uint32_t> sums(9);
                pool.gather(cache.view(), slots.addresses, sums);
                for (size_t k = 0; k < 9; ++k) {
                    const std::vector<uint8_t> expected = cache.block(k);
                    CHECK(std::memcmp(reinterpret_cast<void*>(slots.addresses[k]), expected.data(), expected.size()) ==
                          0);
                    CHECK(sums[k] == crc32c(expected.data(), expected.size()));
                }
            }
        });
    }
    for (std::thread& caller : callers) caller.join();
}

TEST(closing_while_others_call) {
    for (int round = 0; round < 10; ++round) {
        CopyPool pool(3);
        std::atomic<bool> stop{false};
        std::vector<std::thread> callers;
        for (int caller = 0; caller < 2; ++caller) {
            callers.emplace_back([&] {
                std::vector<uint8_t> from(900'000, 1), to(900'000, 0);
                const std::vector<int64_t> source{address(from.data())}, destination{address(to.data())},
                    length{900'000};
                do {
                    std::fill(to.begin(), to.end(), uint8_t{0});
                    pool.copy(destination, source, length);
                    CHECK(from == to);
                } while (!stop.load());
            });
        }
        std::thread other([&] { pool.close(); });
        pool.close();
        other.join();
        stop.store(true);
        for (std::thread& caller : callers) caller.join();
        pool.close();
    }
}

TEST(touch_keeps_what_others_write) {
    constexpr size_t kBytes = 24 << 20;
    void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    auto* words = static_cast<std::atomic<uint64_t>*>(memory);
    CopyPool pool(3);
    std::thread writer([&] {
        for (size_t k = 0; k < kBytes / 8; k += 509) words[k].store(k + 1, std::memory_order_relaxed);
    });
    pool.touch(address(memory) + 1, kBytes - 1, 4096);
    writer.join();
    for (size_t k = 0; k < kBytes / 8; ++k) CHECK(words[k].load() == (k % 509 == 0 ? k + 1 : 0));
    std::vector<unsigned char> resident(kBytes / 4096);
    CHECK(mincore(memory, kBytes, resident.data()) == 0);
    for (const unsigned char page : resident) CHECK((page & 1) == 1);
    const bool tells = madvise(memory, 4096, 23) == 0;  // MADV_POPULATE_WRITE, Linux 5.14
    munmap(memory, kBytes);
    if (!tells) return;
    // Memory that is not there is an exception, not a signal.
    bool failed = false;
    try {
        pool.touch(address(memory), kBytes, 4096);
    } catch (const std::bad_alloc&) {
        failed = true;
    }
    CHECK(failed);
}

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define __SANITIZE_THREAD__ 1
#endif
#endif
#if !defined(__SANITIZE_THREAD__)  // its runtime does not support threads and fork() together
TEST(a_forked_child_copies_alone_and_ends) {
    CopyPool pool(3);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        std::vector<uint8_t> from(2'000'000, 5), to(2'000'000, 0);
        const std::vector<int64_t> source{address(from.data())}, destination{address(to.data())}, length{2'000'000};
        pool.copy(destination, source, length);
        pool.close();
        _exit(from == to ? 0 : 1);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
#endif

RUN_TESTS()
