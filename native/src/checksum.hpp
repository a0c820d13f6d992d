// crc32c (Castagnoli, reflected polynomial 0x82F63B78), the checksum of every stored block.
//
// All implementations give the same results; crc32c() picks the fastest that this CPU runs, once, at start-up.
// Thread safety: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tierkv {

// The crc32c of `length` bytes, going on from `value` (0 to start): crc(crc(0, a), b) is the crc of a followed by b.
uint32_t crc32c(const void* data, size_t length, uint32_t value = 0);

// The same by tables, on any CPU.
uint32_t crc32c_portable(const void* data, size_t length, uint32_t value = 0);

// The crc32c of a followed by b, from the crc32c of each and the length of b.
uint32_t crc32c_combine(uint32_t first, uint32_t second, uint64_t second_length);

// "sse4.2+pclmul", "sse4.2", "armv8" or "portable".
const char* crc32c_implementation();

using Crc32cFunction = uint32_t (*)(const void* data, size_t length, uint32_t value);

// An implementation by its name, or null where this build or this CPU does not have it. For tests and benchmarks.
Crc32cFunction crc32c_named(const char* name);

}  // namespace tierkv
