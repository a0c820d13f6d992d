// Python bindings of the CopyPool and the checksum.
#include "bindings.hpp"
#include "checksum.hpp"
#include "copy.hpp"

namespace tierkv::bindings {
namespace {

// The arrays that describe fragments, held together.
struct FragmentArrays {
    FragmentArrays(nb::handle bases, nb::handle strides, nb::handle lengths, nb::handle block_ids)
        : bases(bases, "bases"),
          strides(strides, "strides"),
          lengths(lengths, "lengths"),
          block_ids(block_ids, "block_ids") {}
    FragmentsView view() const { return {bases.span(), strides.span(), lengths.span(), block_ids.span()}; }
    Array<int64_t> bases, strides, lengths, block_ids;
};

// Addresses are given as integers; a bound of 2^63 - 1 keeps them in int64.
constexpr uint64_t kMostInt64 = INT64_MAX;

}  // namespace

void bind_copy(nb::module_& module) {
    nb::class_<CopyPool>(module, "CopyPool",
                         "Copies batches of pieces on a few threads, the caller's among them.\n\n"
                         "Addresses are of this process. Several threads may call at once; calls share the workers.")
        .def(
            "__init__",
            [](CopyPool* self, nb::handle threads) {
                const auto count = static_cast<unsigned>(whole_number(threads, "threads", 64));
                const nb::gil_scoped_release release;
                new (self) CopyPool(count);
            },
            nb::arg("threads") = 2, nb::sig("def __init__(self, threads: int = 2) -> None"),
            "threads: 1 to 64, the caller's included.")
        .def(
            "gather",
            [](CopyPool& self, nb::handle bases, nb::handle strides, nb::handle lengths, nb::handle block_ids,
               nb::handle destinations) {
                const FragmentArrays fragments(bases, strides, lengths, block_ids);
                const Array<int64_t> slots(destinations, "destinations");
                const nb::gil_scoped_release release;
                self.gather(fragments.view(), slots.span(), {});
            },
            nb::arg("bases"), nb::arg("strides"), nb::arg("lengths"), nb::arg("block_ids"), nb::arg("destinations"),
            nb::sig("def gather(self, bases: _I64, strides: _I64, lengths: _I64, block_ids: _I64, destinations: _I64) "
                    "-> None"),
            "Fragments -> slots: the pieces of block i go one behind the other to destinations[i].")
        .def(
            "gather_checksum",
            [](CopyPool& self, nb::handle bases, nb::handle strides, nb::handle lengths, nb::handle block_ids,
               nb::handle destinations) {
                const FragmentArrays fragments(bases, strides, lengths, block_ids);
                const Array<int64_t> slots(destinations, "destinations");
                Result<uint32_t> checksums(slots.size());
                {
                    const nb::gil_scoped_release release;
                    self.gather(fragments.view(), slots.span(), checksums.span());
                }
                return checksums.take();
            },
            nb::arg("bases"), nb::arg("strides"), nb::arg("lengths"), nb::arg("block_ids"), nb::arg("destinations"),
            nb::sig("def gather_checksum(self, bases: _I64, strides: _I64, lengths: _I64, block_ids: _I64, "
                    "destinations: _I64) -> _U32"),
            "gather() that also returns the crc32c of each block, computed while its bytes are in the cache.")
        .def(
            "scatter",
            [](CopyPool& self, nb::handle bases, nb::handle strides, nb::handle lengths, nb::handle block_ids,
               nb::handle sources) {
                const FragmentArrays fragments(bases, strides, lengths, block_ids);
                const Array<int64_t> slots(sources, "sources");
                const nb::gil_scoped_release release;
                self.scatter(fragments.view(), slots.span());
            },
            nb::arg("bases"), nb::arg("strides"), nb::arg("lengths"), nb::arg("block_ids"), nb::arg("sources"),
            nb::sig("def scatter(self, bases: _I64, strides: _I64, lengths: _I64, block_ids: _I64, sources: _I64) -> "
                    "None"),
            "Slots -> fragments: the inverse of gather().")
        .def(
            "copy",
            [](CopyPool& self, nb::handle destinations, nb::handle sources, nb::handle lengths) {
                const Array<int64_t> to(destinations, "destinations"), from(sources, "sources"),
                    sizes(lengths, "lengths");
                const nb::gil_scoped_release release;
                self.copy(to.span(), from.span(), sizes.span());
            },
            nb::arg("destinations"), nb::arg("sources"), nb::arg("lengths"),
            nb::sig("def copy(self, destinations: _I64, sources: _I64, lengths: _I64) -> None"),
            "memcpy of each piece; pieces must not overlap.")
        .def(
            "crc32c",
            [](CopyPool& self, nb::handle addresses, nb::handle lengths) {
                const Array<int64_t> from(addresses, "addresses"), sizes(lengths, "lengths");
                Result<uint32_t> checksums(from.size());
                {
                    const nb::gil_scoped_release release;
                    self.checksum(from.span(), sizes.span(), checksums.span());
                }
                return checksums.take();
            },
            nb::arg("addresses"), nb::arg("lengths"),
            nb::sig("def crc32c(self, addresses: _I64, lengths: _I64) -> _U32"), "(n,) crc32c of each range.")
        .def(
            "fill",
            [](CopyPool& self, nb::handle addresses, nb::handle lengths, nb::handle seeds) {
                const Array<int64_t> to(addresses, "addresses"), sizes(lengths, "lengths");
                const Array<uint64_t> starts(seeds, "seeds");
                const nb::gil_scoped_release release;
                self.fill(to.span(), sizes.span(), starts.span());
            },
            nb::arg("addresses"), nb::arg("lengths"), nb::arg("seeds"),
            nb::sig("def fill(self, addresses: _I64, lengths: _I64, seeds: npt.NDArray[np.uint64]) -> None"),
            "Fills each range with a fast pseudo-random sequence of its seed (splitmix64, 8 bytes a step, little "
            "endian).")
        .def(
            "differ",
            [](CopyPool& self, nb::handle addresses, nb::handle lengths, nb::handle seeds) {
                const Array<int64_t> from(addresses, "addresses"), sizes(lengths, "lengths");
                const Array<uint64_t> starts(seeds, "seeds");
                Result<bool> differs(from.size());
                static_assert(sizeof(bool) == 1);
                const std::span<uint8_t> bytes(reinterpret_cast<uint8_t*>(differs.span().data()), from.size());
                {
                    const nb::gil_scoped_release release;
                    self.differ(from.span(), sizes.span(), starts.span(), bytes);
                }
                return differs.take();
            },
            nb::arg("addresses"), nb::arg("lengths"), nb::arg("seeds"),
            nb::sig("def differ(self, addresses: _I64, lengths: _I64, seeds: npt.NDArray[np.uint64]) -> _Bool"),
            "(n,) bool: the range differs from what fill() with that seed writes.")
        .def(
            "touch",
            [](CopyPool& self, nb::handle address, nb::handle length, nb::handle page_bytes) {
                const auto start = static_cast<int64_t>(whole_number(address, "address", kMostInt64));
                const auto size = static_cast<int64_t>(whole_number(length, "length", kMostInt64));
                const auto page = static_cast<int64_t>(whole_number(page_bytes, "page_bytes", kMostInt64));
                const nb::gil_scoped_release release;
                self.touch(start, size, page);
            },
            nb::arg("address"), nb::arg("length"), nb::arg("page_bytes"),
            nb::sig("def touch(self, address: int, length: int, page_bytes: int) -> None"),
            "Makes the kernel map every page of the range, writable, without changing its content; safe while others\n"
            "use the memory. MemoryError where the kernel has no memory for it.")
        .def("close", &CopyPool::close, nb::call_guard<nb::gil_scoped_release>(), nb::sig("def close(self) -> None"),
             "Ends the workers; later calls run on the caller's thread. Idempotent.");
}

void bind_checksum(nb::module_& module) {
    module.def(
        "crc32c",
        [](nb::handle data, nb::handle value) {
            const Array<uint8_t> bytes(data, "data");
            const auto start = static_cast<uint32_t>(whole_number(value, "value", UINT32_MAX));
            const nb::gil_scoped_release release;
            return tierkv::crc32c(bytes.data(), bytes.size(), start);
        },
        nb::arg("data"), nb::arg("value") = 0, nb::sig("def crc32c(data: _U8, value: int = 0) -> int"),
        "crc32c (Castagnoli) of a one-dimensional uint8 array, going on from `value`.");
    module.def(
        "crc32c_portable",
        [](nb::handle data, nb::handle value) {
            const Array<uint8_t> bytes(data, "data");
            const auto start = static_cast<uint32_t>(whole_number(value, "value", UINT32_MAX));
            const nb::gil_scoped_release release;
            return tierkv::crc32c_portable(bytes.data(), bytes.size(), start);
        },
        nb::arg("data"), nb::arg("value") = 0, nb::sig("def crc32c_portable(data: _U8, value: int = 0) -> int"),
        "The same by tables, on any CPU.");
    module.def(
        "crc32c_implementation", [] { return tierkv::crc32c_implementation(); },
        nb::sig("def crc32c_implementation() -> str"),
        "What crc32c() runs on here: 'sse4.2+pclmul', 'sse4.2', 'armv8' or 'portable'.");
}

}  // namespace tierkv::bindings
