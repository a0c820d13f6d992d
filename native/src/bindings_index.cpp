// Python bindings of the Index.
#include <nanobind/stl/pair.h>

#include "bindings.hpp"
#include "index.hpp"

namespace tierkv::bindings {
namespace {

HashSpan span_of(const Hashes& hashes) {
    return {hashes.data(), hashes.size()};
}

uint32_t u32(nb::handle argument, const char* name) {
    return static_cast<uint32_t>(whole_number(argument, name, UINT32_MAX));
}

size_t count_of(nb::handle argument) {
    return static_cast<size_t>(whole_number(argument, "count", UINT32_MAX));
}

std::span<const uint8_t> order_of(const nb::bytes& tier_order) {
    return {static_cast<const uint8_t*>(tier_order.data()), tier_order.size()};
}

std::span<uint8_t> as_bytes(std::span<bool> flags) {
    static_assert(sizeof(bool) == 1);
    return {reinterpret_cast<uint8_t*>(flags.data()), flags.size()};
}

nb::tuple chosen_tuple(const Chosen& chosen) {
    return nb::make_tuple(Result<uint32_t>::of(chosen.handles).take(), Result<uint32_t>::of(chosen.slots).take(),
                          Result<uint32_t>::of(chosen.spaces).take(), Result<uint8_t>::of(chosen.hashes, 32).take(),
                          Result<uint8_t>::of(chosen.flags).take(), Result<uint8_t>::of(chosen.tiers).take());
}

void bind_lookups(nb::class_<Index>& index) {
    index
        .def(
            "match",
            [](Index& self, nb::handle space, nb::handle hashes, nb::handle tier_mask) {
                const uint32_t number = u32(space, "space"), mask = u32(tier_mask, "tier_mask");
                const Hashes keys(hashes);
                const nb::gil_scoped_release release;
                return self.match(number, span_of(keys), mask);
            },
            nb::arg("space"), nb::arg("hashes"), nb::arg("tier_mask") = 15,
            nb::sig("def match(self, space: int, hashes: _U8, tier_mask: int = 15) -> int"))
        .def(
            "prefix",
            [](Index& self, nb::handle space, nb::handle hashes, nb::handle tier_mask) {
                const uint32_t number = u32(space, "space"), mask = u32(tier_mask, "tier_mask");
                const Hashes keys(hashes);
                std::vector<uint8_t> masks(keys.size());
                {
                    const nb::gil_scoped_release release;
                    masks.resize(self.prefix(number, span_of(keys), mask, masks));
                }
                return Result<uint8_t>::of(masks).take();
            },
            nb::arg("space"), nb::arg("hashes"), nb::arg("tier_mask") = 15,
            nb::sig("def prefix(self, space: int, hashes: _U8, tier_mask: int = 15) -> _U8"))
        .def(
            "lookup",
            [](Index& self, nb::handle space, nb::handle hashes) {
                const uint32_t number = u32(space, "space");
                const Hashes keys(hashes);
                Result<uint8_t> masks(keys.size());
                {
                    const nb::gil_scoped_release release;
                    self.lookup(number, span_of(keys), masks.span());
                }
                return masks.take();
            },
            nb::arg("space"), nb::arg("hashes"), nb::sig("def lookup(self, space: int, hashes: _U8) -> _U8"))
        .def(
            "resolve",
            [](Index& self, nb::handle space, nb::handle hashes, nb::handle tier) {
                const uint32_t number = u32(space, "space"), where = u32(tier, "tier");
                const Hashes keys(hashes);
                Result<uint32_t> slots(keys.size()), generations(keys.size());
                {
                    const nb::gil_scoped_release release;
                    self.resolve(number, span_of(keys), where, slots.span(), generations.span());
                }
                return nb::make_tuple(slots.take(), generations.take());
            },
            nb::arg("space"), nb::arg("hashes"), nb::arg("tier"),
            nb::sig("def resolve(self, space: int, hashes: _U8, tier: int) -> tuple[_U32, _U32]"))
        .def(
            "valid",
            [](Index& self, nb::handle space, nb::handle hashes, nb::handle tier, nb::handle slots,
               nb::handle generations) {
                const uint32_t number = u32(space, "space"), where = u32(tier, "tier");
                const Hashes keys(hashes);
                const Array<uint32_t> expected(slots, "slots"), stamps(generations, "generations");
                Result<bool> results(keys.size());
                {
                    const nb::gil_scoped_release release;
                    self.valid(number, span_of(keys), where, expected.span(), stamps.span(), as_bytes(results.span()));
                }
                return results.take();
            },
            nb::arg("space"), nb::arg("hashes"), nb::arg("tier"), nb::arg("slots"), nb::arg("generations"),
            nb::sig("def valid(self, space: int, hashes: _U8, tier: int, slots: _U32, generations: _U32) -> _Bool"));
}

void bind_adding(nb::class_<Index>& index) {
    index
        .def(
            "insert",
            [](Index& self, nb::handle space, nb::handle hashes, nb::handle tier, nb::handle slots,
               nb::handle size_class) {
                const uint32_t number = u32(space, "space"), where = u32(tier, "tier");
                const uint32_t kind = u32(size_class, "size_class");
                const Hashes keys(hashes);
                const Array<uint32_t> places(slots, "slots");
                Result<bool> added(keys.size());
                {
                    const nb::gil_scoped_release release;
                    self.insert(number, span_of(keys), where, places.span(), kind, as_bytes(added.span()));
                }
                return added.take();
            },
            nb::arg("space"), nb::arg("hashes"), nb::arg("tier"), nb::arg("slots"), nb::arg("size_class"),
            nb::sig("def insert(self, space: int, hashes: _U8, tier: int, slots: _U32, size_class: int) -> _Bool"))
        .def(
            "reserve",
            [](Index& self, nb::handle space, nb::handle hashes, nb::handle tier, nb::handle slots,
               nb::handle size_class, nb::handle part, nb::handle part_count, double deadline) {
                const uint32_t number = u32(space, "space"), where = u32(tier, "tier");
                const uint32_t kind = u32(size_class, "size_class");
                const uint32_t which = u32(part, "part"), parts = u32(part_count, "part_count");
                const Hashes keys(hashes);
                const Array<uint32_t> places(slots, "slots");
                Result<uint8_t> outcomes(keys.size());
                Result<uint32_t> taken(keys.size()), handles(keys.size());
                size_t used = 0;
                {
                    const nb::gil_scoped_release release;
                    used = self.reserve(number, span_of(keys), where, places.span(), kind, which, parts, deadline,
                                        outcomes.span(), taken.span(), handles.span());
                }
                return nb::make_tuple(outcomes.take(), taken.take(), handles.take(), used);
            },
            nb::arg("space"), nb::arg("hashes"), nb::arg("tier"), nb::arg("slots"), nb::arg("size_class"),
            nb::arg("part"), nb::arg("part_count"), nb::arg("deadline"),
            nb::sig("def reserve(self, space: int, hashes: _U8, tier: int, slots: _U32, size_class: int, part: int, "
                    "part_count: int, deadline: float) -> tuple[_U8, _U32, _U32, int]"))
        .def(
            "commit",
            [](Index& self, nb::handle handles, nb::handle part) {
                const Array<uint32_t> held(handles, "handles");
                const uint32_t which = u32(part, "part");
                Result<bool> completed(held.size());
                {
                    const nb::gil_scoped_release release;
                    self.commit(held.span(), which, as_bytes(completed.span()));
                }
                return completed.take();
            },
            nb::arg("handles"), nb::arg("part"), nb::sig("def commit(self, handles: _U32, part: int) -> _Bool"))
        .def(
            "abort",
            [](Index& self, nb::handle handles) {
                const Array<uint32_t> held(handles, "handles");
                const nb::gil_scoped_release release;
                self.abort(held.span());
            },
            nb::arg("handles"), nb::sig("def abort(self, handles: _U32) -> None"))
        .def(
            "attach",
            [](Index& self, nb::handle handles, nb::handle tier, nb::handle slots, nb::handle size_class) {
                const Array<uint32_t> held(handles, "handles"), places(slots, "slots");
                const uint32_t where = u32(tier, "tier"), kind = u32(size_class, "size_class");
                Result<bool> added(held.size());
                {
                    const nb::gil_scoped_release release;
                    self.attach(held.span(), where, places.span(), kind, as_bytes(added.span()));
                }
                return added.take();
            },
            nb::arg("handles"), nb::arg("tier"), nb::arg("slots"), nb::arg("size_class"),
            nb::sig("def attach(self, handles: _U32, tier: int, slots: _U32, size_class: int) -> _Bool"))
        .def(
            "attach_pending",
            [](Index& self, nb::handle handles, nb::handle tier, nb::handle slots, nb::handle size_class,
               double deadline) {
                const Array<uint32_t> held(handles, "handles"), places(slots, "slots");
                const uint32_t where = u32(tier, "tier"), kind = u32(size_class, "size_class");
                Result<uint32_t> reserved(held.size());
                {
                    const nb::gil_scoped_release release;
                    self.attach_pending(held.span(), where, places.span(), kind, deadline, reserved.span());
                }
                return reserved.take();
            },
            nb::arg("handles"), nb::arg("tier"), nb::arg("slots"), nb::arg("size_class"), nb::arg("deadline"),
            nb::sig("def attach_pending(self, handles: _U32, tier: int, slots: _U32, size_class: int, "
                    "deadline: float) -> _U32"));
}

void bind_pins_and_order(nb::class_<Index>& index) {
    index
        .def(
            "acquire",
            [](Index& self, nb::handle space, nb::handle hashes, const nb::bytes& tier_order) {
                const uint32_t number = u32(space, "space");
                const Hashes keys(hashes);
                Result<uint8_t> tiers(keys.size());
                Result<uint32_t> slots(keys.size()), generations(keys.size()), handles(keys.size());
                const AcquiredSpans spans{tiers.span(), slots.span(), generations.span(), handles.span()};
                {
                    const nb::gil_scoped_release release;
                    self.acquire(number, span_of(keys), order_of(tier_order), spans);
                }
                return nb::make_tuple(tiers.take(), slots.take(), generations.take(), handles.take());
            },
            nb::arg("space"), nb::arg("hashes"), nb::arg("tier_order"),
            nb::sig("def acquire(self, space: int, hashes: _U8, tier_order: bytes) -> tuple[_U8, _U32, _U32, _U32]"))
        .def(
            "release",
            [](Index& self, nb::handle handles) {
                const Array<uint32_t> held(handles, "handles");
                const nb::gil_scoped_release release;
                self.release(held.span());
            },
            nb::arg("handles"), nb::sig("def release(self, handles: _U32) -> None"))
        .def(
            "touch",
            [](Index& self, nb::handle space, nb::handle hashes, nb::handle tier_mask, bool suffix_first, bool mark,
               bool move, bool fastest) {
                const uint32_t number = u32(space, "space"), mask = u32(tier_mask, "tier_mask");
                const Hashes keys(hashes);
                const nb::gil_scoped_release release;
                self.touch(number, span_of(keys), mask, suffix_first, mark, move, fastest);
            },
            nb::arg("space"), nb::arg("hashes"), nb::arg("tier_mask") = 15, nb::arg("suffix_first") = true,
            nb::arg("mark") = true, nb::arg("move") = true, nb::arg("fastest") = false,
            nb::sig("def touch(self, space: int, hashes: _U8, tier_mask: int = 15, suffix_first: bool = True, "
                    "mark: bool = True, move: bool = True, fastest: bool = False) -> None"))
        .def(
            "victims",
            [](Index& self, nb::handle tier, nb::handle size_class, nb::handle count) {
                const uint32_t where = u32(tier, "tier"),
                               kind = static_cast<uint32_t>(whole_number(size_class, "size_class", 255));
                const size_t most = count_of(count);
                Chosen chosen;
                {
                    const nb::gil_scoped_release release;
                    chosen = self.victims(where, kind, most);
                }
                return chosen_tuple(chosen);
            },
            nb::arg("tier"), nb::arg("size_class"), nb::arg("count"),
            nb::sig("def victims(self, tier: int, size_class: int, count: int) -> "
                    "tuple[_U32, _U32, _U32, _U8, _U8, _U8]"))
        .def(
            "in_slots",
            [](Index& self, nb::handle tier, nb::handle slots) {
                const uint32_t where = u32(tier, "tier");
                const Array<uint32_t> places(slots, "slots");
                Chosen chosen;
                {
                    const nb::gil_scoped_release release;
                    chosen = self.choose_in_slots(where, places.span());
                }
                return chosen_tuple(chosen);
            },
            nb::arg("tier"), nb::arg("slots"),
            nb::sig("def in_slots(self, tier: int, slots: _U32) -> tuple[_U32, _U32, _U32, _U8, _U8, _U8]"))
        .def(
            "oldest",
            [](Index& self, nb::handle tier) {
                const uint32_t where = u32(tier, "tier");
                Oldest oldest;
                {
                    const nb::gil_scoped_release release;
                    oldest = self.oldest(where);
                }
                return nb::make_tuple(Result<uint8_t>::of(oldest.size_classes).take(),
                                      Result<uint32_t>::of(oldest.ages_calls).take(),
                                      Result<uint32_t>::of(oldest.slots).take());
            },
            nb::arg("tier"), nb::sig("def oldest(self, tier: int) -> tuple[_U8, _U32, _U32]"))
        .def(
            "lacking",
            [](Index& self, nb::handle tier, nb::handle other, nb::handle count, nb::handle after) {
                const uint32_t where = u32(tier, "tier"), elsewhere = u32(other, "other");
                const size_t most = count_of(count);
                const uint32_t cursor = u32(after, "after");
                Chosen chosen;
                {
                    const nb::gil_scoped_release release;
                    chosen = self.choose_lacking(where, elsewhere, most, cursor);
                }
                return chosen_tuple(chosen);
            },
            nb::arg("tier"), nb::arg("other"), nb::arg("count"), nb::arg("after") = kNone,
            nb::sig("def lacking(self, tier: int, other: int, count: int, after: int = 4294967295) -> "
                    "tuple[_U32, _U32, _U32, _U8, _U8, _U8]"))
        .def(
            "erase",
            [](Index& self, nb::handle handles) {
                const Array<uint32_t> held(handles, "handles");
                const nb::gil_scoped_release release;
                self.erase(held.span());
            },
            nb::arg("handles"), nb::sig("def erase(self, handles: _U32) -> None"))
        .def(
            "evict",
            [](Index& self, nb::handle handles) {
                const Array<uint32_t> held(handles, "handles");
                const nb::gil_scoped_release release;
                return self.evict(held.span());
            },
            nb::arg("handles"), nb::sig("def evict(self, handles: _U32) -> int"));
}

void bind_removing(nb::class_<Index>& index) {
    index
        .def(
            "remove",
            [](Index& self, nb::handle space, nb::handle hashes, nb::handle tier_mask) {
                const uint32_t number = u32(space, "space"), mask = u32(tier_mask, "tier_mask");
                const Hashes keys(hashes);
                const nb::gil_scoped_release release;
                return self.remove(number, span_of(keys), mask);
            },
            nb::arg("space"), nb::arg("hashes"), nb::arg("tier_mask") = 15,
            nb::sig("def remove(self, space: int, hashes: _U8, tier_mask: int = 15) -> int"))
        .def(
            "clear",
            [](Index& self, nb::handle space) {
                const uint32_t number = u32(space, "space");
                const nb::gil_scoped_release release;
                return self.clear(number);
            },
            nb::arg("space"), nb::sig("def clear(self, space: int) -> int"))
        .def(
            "take_freed",
            [](Index& self, nb::handle tier) {
                const uint32_t where = u32(tier, "tier");
                std::deque<Freed> freed;
                {
                    const nb::gil_scoped_release release;
                    freed = self.take_freed(where);
                }
                const size_t count = freed.size();
                Result<uint32_t> slots(count), spaces(count);
                Result<uint8_t> hashes(count, 32), size_classes(count);
                {
                    const nb::gil_scoped_release release;
                    for (size_t k = 0; k < count; ++k) {
                        slots.span()[k] = freed[k].slot;
                        spaces.span()[k] = freed[k].space;
                        std::memcpy(hashes.span().data() + 32 * k, freed[k].hash, 32);
                        size_classes.span()[k] = freed[k].size_class;
                    }
                }
                return nb::make_tuple(slots.take(), spaces.take(), hashes.take(), size_classes.take());
            },
            nb::arg("tier"), nb::sig("def take_freed(self, tier: int) -> tuple[_U32, _U32, _U8, _U8]"));
}

void bind_leases(nb::class_<Index>& index) {
    index
        .def("lease", &Index::lease, nb::arg("deadline"), nb::call_guard<nb::gil_scoped_release>(),
             nb::sig("def lease(self, deadline: float) -> int"))
        .def(
            "lease_add",
            [](Index& self, nb::handle lease, nb::handle space, nb::handle hashes, const nb::bytes& tier_order) {
                const uint64_t which = whole_number(lease, "lease", UINT64_MAX);
                const uint32_t number = u32(space, "space");
                const Hashes keys(hashes);
                Result<uint8_t> tiers(keys.size());
                {
                    const nb::gil_scoped_release release;
                    self.lease_add(which, number, span_of(keys), order_of(tier_order), tiers.span());
                }
                return tiers.take();
            },
            nb::arg("lease"), nb::arg("space"), nb::arg("hashes"), nb::arg("tier_order"),
            nb::sig("def lease_add(self, lease: int, space: int, hashes: _U8, tier_order: bytes) -> _U8"))
        .def(
            "lease_extend",
            [](Index& self, nb::handle lease, double deadline) {
                const uint64_t which = whole_number(lease, "lease", UINT64_MAX);
                const nb::gil_scoped_release release;
                return self.lease_extend(which, deadline);
            },
            nb::arg("lease"), nb::arg("deadline"),
            nb::sig("def lease_extend(self, lease: int, deadline: float) -> bool"))
        .def(
            "lease_release",
            [](Index& self, nb::handle lease) {
                const uint64_t which = whole_number(lease, "lease", UINT64_MAX);
                const nb::gil_scoped_release release;
                return self.lease_release(which);
            },
            nb::arg("lease"), nb::sig("def lease_release(self, lease: int) -> bool"))
        .def("expire", &Index::expire, nb::arg("now"), nb::call_guard<nb::gil_scoped_release>(),
             nb::sig("def expire(self, now: float) -> tuple[int, int]"));
}

void bind_insight(nb::class_<Index>& index) {
    index
        .def(
            "export",
            [](Index& self, nb::handle space, nb::handle tier, nb::handle after, nb::handle count) {
                const uint32_t number = u32(space, "space"), where = u32(tier, "tier"), cursor = u32(after, "after");
                const size_t most = count_of(count);
                Exported exported;
                {
                    const nb::gil_scoped_release release;
                    exported = self.export_ready(number, where, cursor, most);
                }
                return nb::make_tuple(Result<uint8_t>::of(exported.hashes, 32).take(),
                                      Result<uint32_t>::of(exported.slots).take(),
                                      Result<uint32_t>::of(exported.generations).take(), exported.cursor);
            },
            nb::arg("space"), nb::arg("tier"), nb::arg("after") = kNone, nb::arg("count") = 65536,
            nb::sig("def export(self, space: int, tier: int, after: int = 4294967295, count: int = 65536) -> "
                    "tuple[_U8, _U32, _U32, int]"))
        .def(
            "log_changes",
            [](Index& self, nb::handle capacity) {
                const size_t most = static_cast<size_t>(whole_number(capacity, "capacity", UINT32_MAX));
                const nb::gil_scoped_release release;
                self.log_changes(most);
            },
            nb::arg("capacity"), nb::sig("def log_changes(self, capacity: int) -> None"))
        .def(
            "changes",
            [](Index& self, nb::handle after, nb::handle count, nb::handle spaces) {
                const uint64_t number = whole_number(after, "after", UINT64_MAX);
                const size_t most = count_of(count);
                const Array<uint32_t> wanted(spaces, "spaces");
                Changes changes;
                {
                    const nb::gil_scoped_release release;
                    changes = self.changes(number, most, wanted.span());
                }
                return nb::make_tuple(Result<uint32_t>::of(changes.spaces).take(),
                                      Result<uint8_t>::of(changes.hashes, 32).take(),
                                      Result<uint8_t>::of(changes.tiers).take(), changes.next, changes.lost);
            },
            nb::arg("after"), nb::arg("count"), nb::arg("spaces"),
            nb::sig("def changes(self, after: int, count: int, spaces: _U32) -> tuple[_U32, _U8, _U8, int, int]"))
        .def(
            "stats",
            [](Index& self) {
                IndexStats stats;
                {
                    const nb::gil_scoped_release release;
                    stats = self.stats();
                }
                nb::dict result;
                result["entries"] = stats.entries;
                result["residencies"] = stats.residencies;
                result["ready_hbm"] = stats.ready[0];
                result["ready_dram"] = stats.ready[1];
                result["ready_nvme"] = stats.ready[2];
                result["ready_dfs"] = stats.ready[3];
                result["pending"] = stats.pending;
                result["doomed"] = stats.doomed;
                result["pins"] = stats.pins;
                result["leases"] = stats.leases;
                result["bytes"] = stats.bytes;
                return result;
            },
            nb::sig("def stats(self) -> dict[str, int]"))
        .def(
            "check",
            [](Index& self) {
                std::string broken;
                {
                    const nb::gil_scoped_release release;
                    broken = self.check();
                }
                if (!broken.empty()) throw nb::value_error(broken.c_str());
            },
            nb::sig("def check(self) -> None"));
}

}  // namespace

void bind_index(nb::module_& module) {
    nb::class_<Index> index(
        module, "Index",
        "(keyspace number, 32-byte hash) -> residency per tier (slot, generation, pins, flags), and "
        "the order of use.\n\nSee tierkv/_native.pyi for the meaning of every call.");
    index.def(
        "__init__", [](Index* self, nb::handle seed) { new (self) Index(whole_number(seed, "seed", UINT64_MAX)); },
        nb::arg("seed") = 0, nb::sig("def __init__(self, seed: int = 0) -> None"));
    bind_lookups(index);
    bind_adding(index);
    bind_pins_and_order(index);
    bind_removing(index);
    bind_leases(index);
    bind_insight(index);
    module.attr("NO_SLOT") = kNoSlot;
    module.attr("NO_TIER") = kNoTier;
    module.attr("RESERVE_NEW") = static_cast<uint8_t>(Reserve::kNew);
    module.attr("RESERVE_JOINED") = static_cast<uint8_t>(Reserve::kJoined);
    module.attr("RESERVE_KNOWN") = static_cast<uint8_t>(Reserve::kKnown);
    module.attr("RESERVE_BUSY") = static_cast<uint8_t>(Reserve::kBusy);
    module.attr("RESERVE_NO_SLOT") = static_cast<uint8_t>(Reserve::kNoSlot);
    module.attr("FLAG_REUSED") = kFlagReused;
}

}  // namespace tierkv::bindings
