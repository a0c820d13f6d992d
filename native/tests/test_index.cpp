// The index and its parts: the hash table with good and with degenerate hashes, the rules of residencies one by one,
// random histories under check(), and many threads at once. The comparison with a model is tests/native in Python.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "check.hpp"
#include "index.hpp"

using namespace tierkv;
using tierkv::testing::refuses;

namespace {

constexpr uint32_t kSpace = 3;

// n hashes of one number each.
struct Keys {
    std::vector<uint8_t> bytes;
    Keys(std::initializer_list<uint32_t> numbers) : Keys(std::vector<uint32_t>(numbers)) {}
    explicit Keys(const std::vector<uint32_t>& numbers) : bytes(numbers.size() * 32, 0) {
        for (size_t k = 0; k < numbers.size(); ++k) std::memcpy(&bytes[k * 32], &numbers[k], 4);
    }
    HashSpan span() const { return {bytes.data(), bytes.size() / 32}; }
};

Keys range(uint32_t first, uint32_t count) {
    std::vector<uint32_t> numbers;
    for (uint32_t k = 0; k < count; ++k) numbers.push_back(first + k);
    return Keys(numbers);
}

std::vector<uint32_t> numbers(uint32_t first, size_t count) {
    std::vector<uint32_t> list;
    for (size_t k = 0; k < count; ++k) list.push_back(first + static_cast<uint32_t>(k));
    return list;
}

std::vector<uint8_t> insert(Index& index, const Keys& keys, uint32_t tier, uint32_t first_slot, uint32_t size_class = 0,
                            uint32_t space = kSpace) {
    std::vector<uint8_t> added(keys.span().count);
    index.insert(space, keys.span(), tier, numbers(first_slot, added.size()), size_class, added);
    return added;
}

struct Reserved {
    std::vector<uint8_t> outcomes;
    std::vector<uint32_t> slots, handles;
    size_t used = 0;
};

Reserved reserve(Index& index, const Keys& keys, const std::vector<uint32_t>& slots, uint32_t part = 0,
                 uint32_t part_count = 1, double deadline = 100, uint32_t tier = 1) {
    Reserved result;
    const size_t count = keys.span().count;
    result.outcomes.resize(count);
    result.slots.resize(count);
    result.handles.resize(count);
    result.used = index.reserve(kSpace, keys.span(), tier, slots, 0, part, part_count, deadline, result.outcomes,
                                result.slots, result.handles);
    return result;
}

std::vector<uint32_t> acquire(Index& index, const Keys& keys, std::vector<uint8_t> order = {1},
                              uint32_t space = kSpace) {
    const size_t count = keys.span().count;
    std::vector<uint8_t> tiers(count);
    std::vector<uint32_t> slots(count), generations(count), handles(count);
    index.acquire(space, keys.span(), order, {tiers, slots, generations, handles});
    return handles;
}

std::vector<uint8_t> commit(Index& index, const std::vector<uint32_t>& handles, uint32_t part = 0) {
    std::vector<uint8_t> completed(handles.size());
    index.commit(handles, part, completed);
    return completed;
}

// The slots of the victims, which stay where they are.
std::vector<uint32_t> victim_slots(Index& index, size_t count, uint32_t tier = 1, uint32_t size_class = 0) {
    const Chosen chosen = index.victims(tier, size_class, count);
    index.release(chosen.handles);
    return chosen.slots;
}

void ok(Index& index) {
    const std::string broken = index.check();
    if (!broken.empty()) std::fprintf(stderr, "check: %s\n", broken.c_str());
    CHECK(broken.empty());
}

struct HashOf {
    const std::vector<uint64_t>* hashes;
    uint64_t operator()(uint32_t number) const { return (*hashes)[number]; }
    void prefetch(uint32_t) const {}
};

bool contains(const HashTable<HashOf>& table, uint64_t hash, uint32_t number) {
    auto probe = table.start(hash);
    for (;;) {
        const uint32_t found = HashTable<HashOf>::next(probe);
        if (found == kNone) return false;
        if (found == number) return true;
    }
}

// Inserts and erases numbers of the given hashes at random, and looks at everything from time to time.
void exercise(const std::vector<uint64_t>& hashes, size_t steps, uint32_t erase_percent) {
    HashTable<HashOf> table(HashOf{&hashes});
    std::mt19937 random(static_cast<uint32_t>(hashes.size()));
    std::vector<bool> in(hashes.size(), false);
    size_t size = 0;
    for (size_t step = 0; step < steps; ++step) {
        const auto number = static_cast<uint32_t>(random() % hashes.size());
        CHECK(contains(table, hashes[number], number) == in[number]);
        if (!in[number] && random() % 100 >= erase_percent) {
            table.insert(hashes[number], number);
            in[number] = true;
            ++size;
        } else if (in[number]) {
            table.erase(hashes[number], number);
            in[number] = false;
            --size;
        }
        CHECK(table.size() == size);
        if (step % (steps / 5) != 0) continue;
        size_t seen = 0;
        const char* wrong = table.check([&](uint32_t visited) {
            CHECK(in[visited]);
            ++seen;
        });
        if (wrong != nullptr) std::fprintf(stderr, "%s\n", wrong);
        CHECK(wrong == nullptr && seen == size);
    }
    for (uint32_t number = 0; number < hashes.size(); ++number) {
        CHECK(contains(table, hashes[number], number) == in[number]);
        if (in[number]) table.erase(hashes[number], number);
    }
    CHECK(table.size() == 0 && table.check([](uint32_t) { CHECK(false); }) == nullptr);
}

}  // namespace

TEST(table_with_random_hashes) {
    std::mt19937_64 random(1);
    std::vector<uint64_t> hashes(30'000);
    for (uint64_t& hash : hashes) hash = random();
    exercise(hashes, 60'000, 10);
    exercise(hashes, 60'000, 60);
}

TEST(table_with_degenerate_hashes) {
    std::mt19937_64 random(2);
    std::vector<uint64_t> equal(5'000, 0xABCD'EF01'2345'6789);
    exercise(equal, 12'000, 10);
    std::vector<uint64_t> equal_top(12'000), equal_low(6'000), few(6'000);
    for (uint64_t& hash : equal_top) hash = random() >> 40;
    for (uint64_t& hash : equal_low) hash = random() << 40;
    for (uint64_t& hash : few) hash = (random() % 7) * 0x0123'4567'89AB'CDEF;
    exercise(equal_top, 30'000, 10);
    exercise(equal_low, 12'000, 10);
    exercise(few, 12'000, 10);
}

TEST(table_directory_stays_small) {
    // Hashes that no split separates grow their segment, not the directory.
    std::vector<uint64_t> hashes(40'000);
    for (size_t k = 0; k < hashes.size(); ++k) hashes[k] = k & 0xFFF'FFFF;
    HashTable<HashOf> table(HashOf{&hashes});
    for (uint32_t number = 0; number < hashes.size(); ++number) table.insert(hashes[number], number);
    CHECK(table.directory_size() <= 1024);
    CHECK(table.check([](uint32_t) {}) == nullptr);
    for (uint32_t number = 0; number < hashes.size(); number += 97) CHECK(contains(table, hashes[number], number));
}

TEST(match_counts_the_prefix) {
    Index index(1);
    insert(index, range(0, 100), 1, 0);
    insert(index, range(100, 50), 2, 0);
    CHECK(index.match(kSpace, range(0, 200).span(), 15) == 150);
    CHECK(index.match(kSpace, range(0, 200).span(), 2) == 100);
    CHECK(index.match(kSpace, range(0, 200).span(), 4) == 0);
    CHECK(index.match(kSpace, range(100, 50).span(), 4) == 50);
    CHECK(index.match(kSpace + 1, range(0, 200).span(), 15) == 0);
    CHECK(index.match(kSpace, Keys({}).span(), 15) == 0);
    std::vector<uint8_t> masks(200, 99);
    CHECK(index.prefix(kSpace, range(50, 200).span(), 15, masks) == 100);
    for (size_t k = 0; k < 200; ++k) CHECK(masks[k] == (k < 50 ? 2 : k < 100 ? 4 : 99));
    CHECK(index.prefix(kSpace, range(50, 200).span(), 2, masks) == 50);
    CHECK(refuses([&] { index.match(kSpace, range(0, 1).span(), 16); }));
    ok(index);
}

TEST(chains_lose_their_tail_first) {
    Index index(1);
    insert(index, range(0, 5), 1, 0);
    CHECK(victim_slots(index, 5) == std::vector<uint32_t>({4, 3, 2, 1, 0}));
    index.touch(kSpace, range(3, 2).span(), 15, true);
    CHECK(victim_slots(index, 5) == std::vector<uint32_t>({2, 1, 0, 4, 3}));
    index.touch(kSpace, range(0, 2).span(), 15, false);
    CHECK(victim_slots(index, 5) == std::vector<uint32_t>({2, 4, 3, 0, 1}));
    ok(index);
}

TEST(victims_keep_their_order_through_pins) {
    Index index(1);
    insert(index, range(0, 100), 1, 0);  // oldest: slot 99
    const std::vector<uint32_t> pinned = acquire(index, range(40, 60));
    CHECK(victim_slots(index, 3) == std::vector<uint32_t>({39, 38, 37}));  // parks the 60 pinned ones
    ok(index);
    index.release(std::vector<uint32_t>(pinned.begin(), pinned.begin() + 30));  // 40..69
    CHECK(victim_slots(index, 3) == std::vector<uint32_t>({69, 68, 67}));
    index.release(std::vector<uint32_t>(pinned.begin() + 30, pinned.end()));  // 70..99
    CHECK(victim_slots(index, 2) == std::vector<uint32_t>({99, 98}));
    index.touch(kSpace, range(99, 1).span(), 15, true);
    CHECK(victim_slots(index, 1) == std::vector<uint32_t>({98}));
    std::vector<uint32_t> expected;
    for (uint32_t slot = 99; slot-- > 0;) expected.push_back(slot);
    expected.push_back(99);
    CHECK(victim_slots(index, 1000) == expected);
    ok(index);
    const Oldest oldest = index.oldest(1);
    CHECK(oldest.slots == std::vector<uint32_t>({98}) && oldest.ages_calls == std::vector<uint32_t>({1}));
}

TEST(parts_make_a_block) {
    Index index(1);
    const Keys keys = range(0, 3);
    const Reserved first = reserve(index, keys, {10, 11, 12, 13}, 0, 2);
    CHECK(first.outcomes == std::vector<uint8_t>({0, 0, 0}) && first.used == 3);
    CHECK(index.match(kSpace, keys.span(), 15) == 0);
    CHECK(commit(index, first.handles, 0) == std::vector<uint8_t>({0, 0, 0}));
    CHECK(reserve(index, keys, {20}, 0, 2).outcomes == std::vector<uint8_t>({3, 3, 3}));
    const Reserved second = reserve(index, keys, {}, 1, 2);
    CHECK(second.outcomes == std::vector<uint8_t>({1, 1, 1}) && second.slots == first.slots);
    // Another number of parts: what is pending counts.
    CHECK(reserve(index, keys, {30}, 0, 3).outcomes == std::vector<uint8_t>({3, 3, 3}));
    CHECK(refuses([&] { reserve(index, keys, {30}, 2, 2); }));
    CHECK(refuses([&] { commit(index, second.handles, 0); }));
    ok(index);
    CHECK(commit(index, second.handles, 1) == std::vector<uint8_t>({1, 1, 1}));
    CHECK(index.match(kSpace, keys.span(), 2) == 3);
    CHECK(victim_slots(index, 3) == std::vector<uint32_t>({12, 11, 10}));
    CHECK(refuses([&] { commit(index, second.handles, 1); }));
    CHECK(index.stats().pins == 0 && index.stats().pending == 0);
    ok(index);
}

TEST(doomed_blocks_wait_for_their_pins) {
    Index index(1);
    const Keys keys = range(0, 1);
    insert(index, keys, 1, 7);
    const std::vector<uint32_t> handle = acquire(index, keys);
    CHECK(index.remove(kSpace, keys.span(), 15) == 1);
    CHECK(index.match(kSpace, keys.span(), 15) == 0);
    CHECK(index.take_freed(1).empty() && index.stats().doomed == 1);
    const Reserved again = reserve(index, keys, {8});
    CHECK(again.outcomes[0] == 0);
    CHECK(commit(index, again.handles)[0] == 1);
    CHECK(index.match(kSpace, keys.span(), 15) == 1);
    ok(index);
    index.release(handle);
    const std::deque<Freed> freed = index.take_freed(1);
    CHECK(freed.size() == 1 && freed[0].slot == 7 && freed[0].space == kSpace);
    CHECK(std::memcmp(freed[0].hash, keys.bytes.data(), 32) == 0);
    CHECK(refuses([&] { index.release(handle); }));
    ok(index);
}

TEST(reservations_end_in_every_way) {
    Index index(1);
    const Reserved a = reserve(index, range(0, 4), numbers(0, 4), 0, 2, 50);
    const Reserved b = reserve(index, range(0, 4), {}, 1, 2, 10);
    index.abort(std::vector<uint32_t>(a.handles.begin(), a.handles.begin() + 2));
    CHECK(index.take_freed(1).empty());  // part 1 is still being written into these slots
    CHECK(index.expire(49) == std::make_pair(size_t{0}, size_t{0}));
    CHECK(index.expire(50) == std::make_pair(size_t{0}, size_t{2}));
    CHECK(commit(index, b.handles, 1) == std::vector<uint8_t>(4, 0));
    CHECK(index.take_freed(1).size() == 2);
    index.abort(std::vector<uint32_t>(a.handles.begin() + 2, a.handles.begin() + 3));
    CHECK(commit(index, {a.handles[3]}, 0) == std::vector<uint8_t>(1, 0));
    CHECK(index.take_freed(1).size() == 2);
    const IndexStats stats = index.stats();
    CHECK(stats.entries == 0 && stats.residencies == 0 && stats.pins == 0 && stats.doomed == 0);
    ok(index);
}

TEST(refusals_change_nothing) {
    Index index(1);
    const Keys keys = range(0, 4);
    insert(index, keys, 1, 0);
    const std::vector<uint32_t> held = acquire(index, range(0, 2));
    const Reserved pending = reserve(index, range(10, 2), {50, 51}, 0, 2);
    for (const std::vector<uint32_t>& bad : {std::vector<uint32_t>{held[0], held[0]},
                                             {held[0], 999},
                                             {held[1], pending.handles[0]},
                                             {held[0], 2},
                                             {kRecordLimit}}) {
        CHECK(refuses([&] { index.release(bad); }));
        CHECK(refuses([&] { index.erase(bad); }));
        CHECK(refuses([&] { index.abort(bad); }));
        CHECK(refuses([&] { commit(index, bad); }));
        ok(index);
    }
    CHECK(refuses([&] { commit(index, {pending.handles[0], pending.handles[0]}); }));
    CHECK(refuses([&] { index.release(pending.handles); }));
    CHECK(refuses([&] { index.erase(std::vector<uint32_t>{kNoSlot}); }));
    std::vector<uint8_t> added(1);
    CHECK(refuses(
        [&] { index.attach(std::vector<uint32_t>{pending.handles[0]}, 2, std::vector<uint32_t>{1}, 0, added); }));
    CHECK(refuses([&] { index.attach(std::vector<uint32_t>{held[0]}, 4, std::vector<uint32_t>{1}, 0, added); }));
    CHECK(refuses([&] { index.attach(std::vector<uint32_t>{held[0]}, 2, {}, 0, added); }));
    CHECK(refuses([&] { insert(index, keys, 4, 0); }));
    CHECK(refuses([&] { insert(index, keys, 1, 0, 256); }));
    CHECK(refuses([&] { insert(index, range(20, 1), 1, kNoSlot); }));
    CHECK(refuses([&] { index.choose_in_slots(1, std::vector<uint32_t>{2, 1}); }));
    CHECK(refuses([&] { index.lease(std::nan("")); }));
    ok(index);
    CHECK(index.stats().pins == 4 && index.stats().ready[1] == 4 && index.stats().pending == 2);
    index.release(std::vector<uint32_t>{held[0], kNoSlot, held[1]});
    index.abort(pending.handles);
    CHECK(index.stats().pins == 0);
}

TEST(leases_end_by_release_and_by_time) {
    Index index(1);
    const Keys keys = range(0, 10);
    insert(index, keys, 1, 0);
    std::vector<uint8_t> tiers(12);
    const uint64_t first = index.lease(10), second = index.lease(20);
    index.lease_add(first, kSpace, range(0, 12).span(), std::vector<uint8_t>{2, 1}, tiers);
    CHECK(tiers[9] == 1 && tiers[10] == kNoTier);
    index.lease_add(second, kSpace, range(0, 12).span(), std::vector<uint8_t>{1}, tiers);
    CHECK(index.stats().pins == 20 && index.stats().leases == 2);
    CHECK(index.victims(1, 0, 10).handles.empty());
    ok(index);
    CHECK(index.expire(10) == std::make_pair(size_t{1}, size_t{0}));
    CHECK(!index.lease_extend(first, 30) && index.lease_extend(second, 30));
    CHECK(index.expire(20).first == 0);
    index.lease_add(first, kSpace, keys.span(), std::vector<uint8_t>{1}, std::span<uint8_t>(tiers).first(10));
    CHECK(tiers[0] == kNoTier);
    CHECK(index.lease_release(second) && !index.lease_release(second));
    CHECK(index.stats().pins == 0);
    CHECK(victim_slots(index, 10).size() == 10);
    ok(index);
}

TEST(copies_in_other_tiers) {
    Index index(1);
    const Keys keys = range(0, 3);
    insert(index, keys, 1, 0);
    const std::vector<uint32_t> handles = acquire(index, keys);
    index.remove(kSpace, range(1, 1).span(), 2);
    std::vector<uint8_t> added(3);
    index.attach(handles, 2, std::vector<uint32_t>{100, 101, 102}, 5, added);
    CHECK(added == std::vector<uint8_t>({1, 0, 1}));
    index.attach(std::vector<uint32_t>{handles[0]}, 2, std::vector<uint32_t>{103}, 5,
                 std::span<uint8_t>(added).first(1));
    CHECK(added[0] == 0);
    CHECK(victim_slots(index, 9, 2, 5) == std::vector<uint32_t>({102, 100}));
    CHECK(index.choose_lacking(1, 2, 10, kNone).handles.empty());
    const Chosen lacking = index.choose_lacking(1, 3, 1, kNone);
    CHECK(lacking.handles.size() == 1 && lacking.tiers[0] == 6);
    const Chosen rest = index.choose_lacking(1, 3, 10, lacking.handles[0]);
    CHECK(rest.handles.size() == 1 && rest.slots[0] != lacking.slots[0]);
    const Chosen there = index.choose_in_slots(2, std::vector<uint32_t>{1, 100, 101});
    CHECK(there.slots == std::vector<uint32_t>({100}));
    index.erase(there.handles);
    CHECK(index.take_freed(2).size() == 1);
    index.erase(handles);
    index.erase(lacking.handles);
    index.erase(rest.handles);
    ok(index);
    CHECK(index.take_freed(1).size() == 3 && index.stats().entries == 1);
    CHECK(index.clear(kSpace + 1) == 0 && index.clear(kSpace) == 1);
    CHECK(index.stats().residencies == 0);
    ok(index);
}

TEST(no_copy_survives_a_clear) {
    // One thread copies blocks to other tiers and promotes them through reservations while another clears the keyspace.
    // The free records lie in front, so that copies land behind the walk.
    for (int round = 0; round < 30; ++round) {
        Index index(static_cast<uint64_t>(round));
        constexpr uint32_t kBlocks = 40'000;
        insert(index, range(0, kBlocks), 1, 0, 0, kSpace + 1);
        insert(index, range(0, kBlocks), 1, 0);
        index.clear(kSpace + 1);
        const std::vector<uint32_t> handles = acquire(index, range(0, kBlocks));
        std::atomic<bool> copying{false};
        std::thread copier([&] {
            // From the last block on: those that the walk reaches last.
            for (uint32_t first = kBlocks; first >= 100; first -= 100) {
                const std::span<const uint32_t> some(handles.data() + first - 100, 100);
                std::vector<uint8_t> added(100);
                std::vector<uint32_t> reserved(100);
                index.attach(some, 2, numbers(first, 100), 0, added);
                index.attach_pending(some, 3, numbers(first, 100), 0, 1e9, reserved);
                copying.store(true);
                for (const uint32_t handle : reserved) {
                    if (handle != kNoSlot) commit(index, {handle});
                }
                index.erase(some);  // the source goes before the walk reaches it
            }
        });
        while (!copying.load()) std::this_thread::yield();
        index.clear(kSpace);
        // From here on the sources are doomed, so nothing new may appear either.
        copier.join();
        CHECK(index.match(kSpace, range(0, kBlocks).span(), 15) == 0);
        const IndexStats stats = index.stats();
        CHECK(stats.entries == 0 && stats.pins == 0);
    }
}

TEST(export_walks_in_steps) {
    Index index(1);
    for (uint32_t k = 0; k < 150'000; k += 5'000) insert(index, range(k, 5'000), 1, k, 0, k % 10'000 == 0 ? 1 : 2);
    std::set<uint32_t> slots;
    uint32_t cursor = kNone;
    size_t calls = 0;
    do {
        const Exported exported = index.export_ready(1, 1, cursor, 30'000);
        slots.insert(exported.slots.begin(), exported.slots.end());
        CHECK(exported.slots.size() <= 30'000 && exported.hashes.size() == exported.slots.size() * 32);
        cursor = exported.cursor;
        ++calls;
    } while (cursor != kNone);
    CHECK(slots.size() == 75'000 && calls >= 3);
    CHECK(index.export_ready(1, 2, kNone, 10).slots.empty());
    CHECK(refuses([&] { index.export_ready(1, 1, kNone, 0); }));
}

TEST(memory_stays_below_100_bytes_a_block) {
    Index index(1);
    for (uint32_t k = 0; k < 300'000; k += 10'000) insert(index, range(k, 10'000), 1, k);
    CHECK(index.stats().bytes <= 300'000 * 100 + (4 << 20));
    const uint64_t before = index.stats().bytes;
    // Turning over the whole content needs no more.
    for (uint32_t k = 0; k < 600'000; k += 10'000) {
        const Chosen victims = index.victims(1, 0, 10'000);
        CHECK(victims.handles.size() == 10'000);
        index.erase(victims.handles);
        CHECK(index.take_freed(1).size() == 10'000);
        insert(index, range(1'000'000 + k, 10'000), 1, k);
    }
    CHECK(index.stats().bytes <= before + before / 8);
    ok(index);
}

namespace {

// One thread's random history; it releases all that it holds at the end.
void history(Index& index, uint32_t seed, size_t steps, uint32_t keys) {
    std::mt19937 random(seed);
    struct Held {
        std::vector<uint32_t> handles;
        uint32_t part;
    };
    std::vector<Held> pins, writes;
    std::vector<uint64_t> leases;
    std::vector<uint8_t> small(64);
    uint32_t slot = seed * 1'000'000;
    const auto some = [&] { return range(random() % keys, random() % 12); };
    const auto real = [](const std::vector<uint32_t>& handles) {
        std::vector<uint32_t> list;
        for (const uint32_t handle : handles) {
            if (handle != kNoSlot) list.push_back(handle);
        }
        return list;
    };
    const auto end_write = [&] {
        if (writes.empty()) return;
        const Held write = writes.back();
        writes.pop_back();
        if (random() % 4 == 0) {
            index.abort(write.handles);
        } else {
            commit(index, write.handles, write.part);
        }
    };
    const auto end_pin = [&] {
        if (pins.empty()) return;
        const size_t at = random() % pins.size();
        std::vector<uint32_t> handles = pins[at].handles;
        pins.erase(pins.begin() + static_cast<ptrdiff_t>(at));
        if (random() % 3 == 0) {
            index.erase(handles);
        } else {
            index.release(handles);
        }
    };
    for (size_t step = 0; step < steps; ++step) {
        const Keys chosen = some();
        const size_t count = chosen.span().count;
        switch (random() % 14) {
            case 0: {
                insert(index, chosen, 1 + random() % 3, slot);
                slot += 12;
                break;
            }
            case 1:
            case 2: {
                const uint32_t part = random() % 2;
                // The number of parts follows from the key, as it follows from the keyspace in a store.
                const Reserved reserved = reserve(index, chosen, numbers(slot, random() % 12), part, 2,
                                                  static_cast<double>(step + random() % 50));
                slot += 12;
                writes.push_back({real(reserved.handles), part});
                break;
            }
            case 3:
            case 4:
                end_write();
                break;
            case 5: {
                const Reserved reserved = reserve(index, chosen, numbers(slot, 12), 0, 1, 1e9, 3);
                slot += 12;
                commit(index, real(reserved.handles), 0);
                break;
            }
            case 6:
                pins.push_back({real(acquire(index, chosen, {1, 2, 3})), 0});
                break;
            case 7:
            case 8:
                end_pin();
                break;
            case 9:
                index.touch(kSpace, chosen.span(), 15, random() % 2 == 0, random() % 2 == 0, random() % 4 != 0,
                            random() % 2 == 0);
                break;
            case 10: {
                const Chosen victims = index.victims(1 + random() % 3, 0, random() % 8);
                std::vector<uint8_t> added(victims.handles.size());
                index.attach(victims.handles, 2, numbers(slot, added.size()), 0, added);
                slot += 12;
                pins.push_back({victims.handles, 0});
                break;
            }
            case 11:
                if (random() % 4 == 0) index.remove(kSpace, chosen.span(), random() % 16);
                index.take_freed(random() % 4);
                break;
            case 12: {
                leases.push_back(index.lease(static_cast<double>(step + random() % 100)));
                index.lease_add(leases.back(), kSpace, chosen.span(), std::vector<uint8_t>{3, 1},
                                std::span<uint8_t>(small).first(count));
                if (random() % 2 == 0) index.lease_release(leases[random() % leases.size()]);
                index.expire(static_cast<double>(step));
                break;
            }
            default: {
                const size_t length = index.match(kSpace, chosen.span(), 15);
                CHECK(length <= count);
                index.lookup(kSpace, chosen.span(), std::span<uint8_t>(small).first(count));
                const Chosen lacking = index.choose_lacking(1, 2, 5, random() % 100);
                index.release(lacking.handles);
                index.oldest(1);
                index.export_ready(kSpace, 1, kNone, 50);
                if (random() % 200 == 0) index.clear(kSpace);
                break;
            }
        }
    }
    while (!writes.empty()) end_write();
    while (!pins.empty()) end_pin();
    for (const uint64_t lease : leases) index.lease_release(lease);
}

}  // namespace

TEST(changes_are_numbered_and_overwritten) {
    Index index(1);
    insert(index, range(0, 2), 1, 0);
    CHECK(index.changes(0, 10, {}).next == 0);  // nothing is logged before it is asked for
    index.log_changes(4);
    index.log_changes(100);  // the first call decides
    insert(index, range(2, 3), 1, 2);
    Changes changes = index.changes(0, 2, {});
    CHECK(changes.next == 2 && changes.lost == 0 && changes.hashes.size() == 64);
    CHECK((changes.tiers == std::vector<uint8_t>{2, 2}));
    index.remove(kSpace, range(2, 2).span(), 15);
    changes = index.changes(0, 10, {});  // the first of five is gone
    CHECK(changes.next == 5 && changes.lost == 1);
    CHECK((changes.tiers == std::vector<uint8_t>{2, 2, 0, 0}));
    const std::vector<uint32_t> others = {kSpace + 1, kSpace + 2};
    changes = index.changes(1, 10, others);
    CHECK(changes.next == 5 && changes.tiers.empty());
    CHECK(index.changes(99, 10, {}).next == 5);
    CHECK(refuses([&] { index.changes(0, 1, std::vector<uint32_t>{2, 1}); }));
    CHECK(refuses([&] { index.log_changes(0); }));
}

TEST(random_histories_keep_the_invariants) {
    for (uint32_t seed = 0; seed < 60; ++seed) {
        Index index(seed);
        for (uint32_t round = 0; round < 6; ++round) {
            history(index, seed * 10 + round, 60, 8 + seed * 3);
            ok(index);
            CHECK(index.stats().pins == 0 && index.stats().doomed == 0 && index.stats().leases == 0);
        }
    }
}

TEST(many_threads) {
    Index index(9);
    std::vector<std::thread> threads;
    std::atomic<int> running{4};
    for (uint32_t thread = 0; thread < 4; ++thread) {
        threads.emplace_back([&, thread] {
            history(index, thread + 1, 4'000, 200);
            --running;
        });
    }
    while (running.load() != 0) {
        ok(index);
        std::this_thread::yield();
    }
    for (std::thread& thread : threads) thread.join();
    ok(index);
    index.expire(1e12);
    const IndexStats stats = index.stats();
    CHECK(stats.pins == 0 && stats.doomed == 0 && stats.pending == 0 && stats.leases == 0);
    index.clear(kSpace);
    CHECK(index.stats().entries == 0 && index.stats().residencies == 0);
    ok(index);
}

TEST(growth_under_look_ups) {
    Index index(4);
    std::atomic<uint32_t> filled{0};
    std::thread writer([&] {
        for (uint32_t k = 0; k < 60'000; k += 500) {
            insert(index, range(k, 500), 1, k);
            filled.store(k + 500);
        }
    });
    std::mt19937 random(5);
    while (filled.load() < 60'000) {
        const uint32_t sure = filled.load();
        if (sure == 0) continue;
        const uint32_t first = random() % sure;
        const uint32_t count = std::min<uint32_t>(1'000, sure - first);
        CHECK(index.match(kSpace, range(first, count).span(), 2) == count);
    }
    writer.join();
    ok(index);
}

RUN_TESTS()
