// The index of one node: (keyspace number, 32-byte hash) -> residencies, their pins, leases and order of use.
//
// It records decisions, it makes none: slots come from the caller and go back through take_freed(), victims are
// named and erased by the caller. Vocabulary and meaning of every call: tierkv/_native.pyi.
//
// Thread safety: every method may be called from any thread; one mutex guards all. Calls that may have to walk the
// whole index (choose_in_slots, choose_lacking, clear) let others in between.
//
// Errors: std::invalid_argument for bad arguments, before anything has changed; std::bad_alloc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "changes.hpp"
#include "mixer.hpp"
#include "records.hpp"
#include "use_order.hpp"

namespace tierkv {

constexpr uint8_t kFlagReused = 1;
constexpr uint32_t kMostParts = 64;

enum class Reserve : uint8_t { kNew = 0, kJoined = 1, kKnown = 2, kBusy = 3, kNoSlot = 4 };

// `count` hashes of 32 bytes, one behind the other.
struct HashSpan {
    const uint8_t* data;
    size_t count;
    const uint8_t* operator[](size_t position) const { return data + position * kHashBytes; }
};

// Residencies that a call chose and pinned, in its order.
struct Chosen {
    std::vector<uint32_t> handles, slots, spaces;
    std::vector<uint8_t> hashes;  // 32 bytes each
    std::vector<uint8_t> flags, tiers;
};

// A slot that nothing uses any more, and the block that was in it.
struct Freed {
    uint32_t slot;
    uint32_t space;
    uint8_t hash[kHashBytes];
    uint8_t size_class;
};

struct Exported {
    std::vector<uint8_t> hashes;  // 32 bytes each
    std::vector<uint32_t> slots, generations;
    uint32_t cursor = kNone;
};

struct Oldest {
    std::vector<uint8_t> size_classes;
    std::vector<uint32_t> ages_calls, slots;
};

struct IndexStats {
    uint64_t entries = 0, residencies = 0, pending = 0, doomed = 0, pins = 0, leases = 0, bytes = 0;
    uint64_t ready[kTierCount] = {};
};

// Where acquire() writes: each span has one entry a hash.
struct AcquiredSpans {
    std::span<uint8_t> tiers;
    std::span<uint32_t> slots, generations, handles;
};

class Index {
  public:
    explicit Index(uint64_t seed);
    Index(const Index&) = delete;
    Index& operator=(const Index&) = delete;

    size_t match(uint32_t space, HashSpan hashes, uint32_t tier_mask);
    size_t prefix(uint32_t space, HashSpan hashes, uint32_t tier_mask, std::span<uint8_t> masks);
    void lookup(uint32_t space, HashSpan hashes, std::span<uint8_t> masks);
    void resolve(uint32_t space, HashSpan hashes, uint32_t tier, std::span<uint32_t> slots,
                 std::span<uint32_t> generations);
    void valid(uint32_t space, HashSpan hashes, uint32_t tier, std::span<const uint32_t> slots,
               std::span<const uint32_t> generations, std::span<uint8_t> results);

    void insert(uint32_t space, HashSpan hashes, uint32_t tier, std::span<const uint32_t> slots, uint32_t size_class,
                std::span<uint8_t> added);
    // Returns how many of `slots` were used.
    size_t reserve(uint32_t space, HashSpan hashes, uint32_t tier, std::span<const uint32_t> slots, uint32_t size_class,
                   uint32_t part, uint32_t part_count, double deadline, std::span<uint8_t> outcomes,
                   std::span<uint32_t> used_slots, std::span<uint32_t> handles);
    void commit(std::span<const uint32_t> handles, uint32_t part, std::span<uint8_t> completed);
    void abort(std::span<const uint32_t> handles);
    void attach(std::span<const uint32_t> handles, uint32_t tier, std::span<const uint32_t> slots, uint32_t size_class,
                std::span<uint8_t> added);

    void attach_pending(std::span<const uint32_t> handles, uint32_t tier, std::span<const uint32_t> slots,
                        uint32_t size_class, double deadline, std::span<uint32_t> reserved);

    void acquire(uint32_t space, HashSpan hashes, std::span<const uint8_t> tier_order, const AcquiredSpans& acquired);
    void release(std::span<const uint32_t> handles);

    void touch(uint32_t space, HashSpan hashes, uint32_t tier_mask, bool suffix_first = true, bool mark = true,
               bool move = true, bool fastest = false);
    Chosen victims(uint32_t tier, uint32_t size_class, size_t count);
    Chosen choose_in_slots(uint32_t tier, std::span<const uint32_t> slots);
    Chosen choose_lacking(uint32_t tier, uint32_t other, size_t count, uint32_t after);
    Oldest oldest(uint32_t tier);
    void erase(std::span<const uint32_t> handles) { erase_pinned(handles, false); }
    // erase() of those that nobody else has pinned meanwhile; of the others only the caller's pin. Returns how many.
    size_t evict(std::span<const uint32_t> handles) { return erase_pinned(handles, true); }

    size_t remove(uint32_t space, HashSpan hashes, uint32_t tier_mask);
    size_t clear(uint32_t space);
    std::deque<Freed> take_freed(uint32_t tier);

    uint64_t lease(double deadline);
    void lease_add(uint64_t lease, uint32_t space, HashSpan hashes, std::span<const uint8_t> tier_order,
                   std::span<uint8_t> tiers);
    bool lease_extend(uint64_t lease, double deadline);
    bool lease_release(uint64_t lease);
    // (leases, pending blocks) that ended.
    std::pair<size_t, size_t> expire(double now);

    // From now on changes are logged; the last `capacity` of them can be read. The first call decides.
    void log_changes(size_t capacity);
    // Up to `count` changes from number `after` on, of the keyspaces `spaces` (sorted; empty: of all).
    Changes changes(uint64_t after, size_t count, std::span<const uint32_t> spaces);

    Exported export_ready(uint32_t space, uint32_t tier, uint32_t after, size_t count);
    IndexStats stats();
    // Empty, or the first broken invariant.
    std::string check();

  private:
    struct HashOfEntry {
        const Mixer* mixer;
        const RecordPool<Entry>* entries;
        uint64_t operator()(uint32_t entry) const { return (*mixer)((*entries)[entry].hash, (*entries)[entry].space); }
        void prefetch(uint32_t entry) const { entries->prefetch(entry); }
    };
    struct Pending {
        uint32_t residency = kNone;  // kNone: not in use
        uint32_t part_count = 0;
        uint64_t written = 0;  // bit k: part k is in
        uint64_t writing = 0;  // bit k: part k is reserved; each such bit is one of the residency's pins
        double deadline = 0;
    };
    struct Lease {
        double deadline = 0;
        std::vector<uint32_t> handles;
    };

    // Gets memory for `blocks` more blocks. To be called without the mutex: the kernel may take milliseconds to clear
    // huge pages, and look-ups must not wait for that.
    void make_room(size_t blocks);

    // Takes the mutex itself. spare_shared: leave what has other pins than the caller's.
    size_t erase_pinned(std::span<const uint32_t> handles, bool spare_shared);

    // All below: the mutex is held.
    template <typename VisitGroup>
    void each_group(uint32_t space, HashSpan hashes, VisitGroup visit);
    uint32_t find(uint32_t space, const uint8_t* hash, uint64_t mixed) const;
    void find_all(uint32_t space, HashSpan hashes);
    // The entry of find_all()'s position, looked up again where it was missing then.
    uint32_t entry_at(uint32_t space, HashSpan hashes, size_t position);
    uint32_t make_entry(uint32_t space, const uint8_t* hash);
    // The entry's ready or pending residency in `tier`, or kNone.
    uint32_t residency_in(uint32_t entry, uint32_t tier) const;
    uint32_t ready_in(uint32_t entry, uint32_t tier) const;
    uint32_t add_residency(uint32_t entry, uint32_t tier, uint32_t slot, uint32_t size_class, State state);
    void make_ready(uint32_t residency);
    uint32_t add_pending(uint32_t residency, uint32_t part_count, double deadline);
    void drop_pending(uint32_t residency);
    void pin(uint32_t residency);
    void unpin(uint32_t residency);
    void doom(uint32_t residency);
    void free_residency(uint32_t residency);
    bool pinned(uint32_t handle) const;
    bool may_copy(const Residency& source, uint32_t tier) const;
    // Throws, with nothing changed, unless every handle has a pin for each time it is listed and `fits` its record.
    template <typename Fits>
    void check_handles(std::span<const uint32_t> handles, bool skip_none, const char* expected, Fits fits);
    void acquire_found(std::span<const uint8_t> tier_order, const AcquiredSpans& acquired);
    void choose(Chosen& chosen, uint32_t residency);
    void end_lease(std::unordered_map<uint64_t, Lease>::iterator lease);
    uint64_t bytes() const;
    std::string check_entries(std::vector<uint8_t>& residency_seen) const;
    std::string check_residency(uint32_t residency) const;

    std::mutex mutex_;
    const Mixer mixer_;
    RecordPool<Entry> entries_;
    RecordPool<Residency> residencies_;
    HashTable<HashOfEntry> table_;
    UseOrder order_;
    std::vector<Pending> pending_;
    std::vector<uint32_t> pending_free_;
    std::unordered_map<uint64_t, Lease> leases_;
    uint64_t last_lease_ = 0;
    std::deque<Freed> freed_[kTierCount];
    ChangeLog log_;
    std::vector<uint32_t> clearing_;  // keyspaces that clear() is walking for
    uint32_t last_generation_ = 0;
    uint64_t ready_[kTierCount] = {};
    uint64_t doomed_ = 0;
    uint64_t pins_ = 0;
    std::vector<uint32_t> found_;  // scratch of find_all()
};

}  // namespace tierkv
