#include "checksum.hpp"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

namespace tierkv {
namespace {

// Polynomials over GF(2) of degree below 32 are kept reflected: bit i is the coefficient of x^(31 - i).
constexpr uint32_t kPolynomial = 0x82F63B78;
constexpr uint32_t kOne = 0x80000000;  // x^0

constexpr uint32_t times_x(uint32_t a) {
    return (a >> 1) ^ ((a & 1) ? kPolynomial : 0);
}

// a * b mod P.
constexpr uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (int bit = 31; bit >= 0; --bit) {
        if ((a >> bit) & 1) product ^= b;
        b = times_x(b);
    }
    return product;
}

// x^(2^k) mod P for k = 0..63.
constexpr std::array<uint32_t, 64> make_powers() {
    std::array<uint32_t, 64> powers{};
    powers[0] = kOne >> 1;
    for (size_t k = 1; k < powers.size(); ++k) powers[k] = multiply(powers[k - 1], powers[k - 1]);
    return powers;
}
constexpr std::array<uint32_t, 64> kPowers = make_powers();

// x^n mod P.
constexpr uint32_t power_of_x(uint64_t n) {
    uint32_t result = kOne;
    for (size_t k = 0; n != 0; ++k, n >>= 1) {
        if (n & 1) result = multiply(result, kPowers[k]);
    }
    return result;
}

// Table k gives the effect of one byte followed by k zero bytes.
constexpr size_t kTables = 16;
constexpr std::array<std::array<uint32_t, 256>, kTables> make_tables() {
    std::array<std::array<uint32_t, 256>, kTables> tables{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t value = byte;
        for (int bit = 0; bit < 8; ++bit) value = times_x(value);
        tables[0][byte] = value;
    }
    for (size_t k = 1; k < kTables; ++k) {
        for (size_t byte = 0; byte < 256; ++byte) {
            const uint32_t previous = tables[k - 1][byte];
            tables[k][byte] = (previous >> 8) ^ tables[0][previous & 0xFF];
        }
    }
    return tables;
}
constexpr std::array<std::array<uint32_t, 256>, kTables> kTable = make_tables();

// The functions below carry the raw register, without the inversion at both ends.

uint32_t update_bytes(uint32_t state, const uint8_t* data, size_t length) {
    for (; length != 0; --length) state = (state >> 8) ^ kTable[0][(state ^ *data++) & 0xFF];
    return state;
}

uint32_t update_portable(uint32_t state, const uint8_t* data, size_t length) {
    for (; length >= kTables; length -= kTables, data += kTables) {
        const uint8_t first[4] = {static_cast<uint8_t>(data[0] ^ state), static_cast<uint8_t>(data[1] ^ (state >> 8)),
                                  static_cast<uint8_t>(data[2] ^ (state >> 16)),
                                  static_cast<uint8_t>(data[3] ^ (state >> 24))};
        uint32_t next = kTable[15][first[0]] ^ kTable[14][first[1]] ^ kTable[13][first[2]] ^ kTable[12][first[3]];
        for (size_t k = 4; k < kTables; ++k) next ^= kTable[kTables - 1 - k][data[k]];
        state = next;
    }
    return update_bytes(state, data, length);
}

// The CPU's crc instruction has a latency of three cycles and a throughput of one, so three neighbouring strips of a
// buffer are summed at once and joined: the sum of a strip times x^(bits that follow it). Two strip lengths, so that
// buffers of a few KiB gain too.
constexpr size_t kLongStrip = 4096;
constexpr size_t kShortStrip = 256;

#if defined(__x86_64__)

// A carry-less product of reflected 32-bit polynomials, read as a 64-bit word, is their product times x, and the crc
// instruction multiplies by x^32 and reduces. So the factor for a shift by n bits is x^(n - 33).
template <size_t kStrip>
struct StripFactors {
    static constexpr uint32_t one = power_of_x(8 * kStrip);
    static constexpr uint32_t two = power_of_x(16 * kStrip);
    static constexpr uint32_t one_folded = power_of_x(8 * kStrip - 33);
    static constexpr uint32_t two_folded = power_of_x(16 * kStrip - 33);
};

__attribute__((always_inline)) inline uint64_t load(const uint8_t* data) {
    uint64_t word;
    std::memcpy(&word, data, sizeof word);
    return word;
}

struct Strips {
    uint64_t a, b, c;
};

template <size_t kStrip>
__attribute__((target("sse4.2"), always_inline)) inline Strips sum_strips(uint32_t state, const uint8_t* data) {
    Strips sums{state, 0, 0};
    for (size_t offset = 0; offset < kStrip; offset += 8) {
        sums.a = _mm_crc32_u64(sums.a, load(data + offset));
        sums.b = _mm_crc32_u64(sums.b, load(data + kStrip + offset));
        sums.c = _mm_crc32_u64(sums.c, load(data + 2 * kStrip + offset));
    }
    return sums;
}

__attribute__((target("sse4.2"))) inline uint32_t update_tail(uint32_t state, const uint8_t* data, size_t length) {
    uint64_t wide = state;
    for (; length >= 8; length -= 8, data += 8) wide = _mm_crc32_u64(wide, load(data));
    uint32_t narrow = static_cast<uint32_t>(wide);
    for (; length != 0; --length) narrow = _mm_crc32_u8(narrow, *data++);
    return narrow;
}

template <size_t kStrip>
__attribute__((target("sse4.2"))) inline uint32_t strips_sse(uint32_t state, const uint8_t*& data, size_t& length) {
    using Factors = StripFactors<kStrip>;
    for (; length >= 3 * kStrip; length -= 3 * kStrip, data += 3 * kStrip) {
        const Strips sums = sum_strips<kStrip>(state, data);
        state = multiply(static_cast<uint32_t>(sums.a), Factors::two) ^
                multiply(static_cast<uint32_t>(sums.b), Factors::one) ^ static_cast<uint32_t>(sums.c);
    }
    return state;
}

__attribute__((target("sse4.2"))) uint32_t update_sse(uint32_t state, const uint8_t* data, size_t length) {
    state = strips_sse<kLongStrip>(state, data, length);
    return update_tail(state, data, length);
}

template <size_t kStrip>
__attribute__((target("sse4.2,pclmul"))) inline uint32_t strips_clmul(uint32_t state, const uint8_t*& data,
                                                                      size_t& length) {
    using Factors = StripFactors<kStrip>;
    const __m128i factors = _mm_set_epi64x(Factors::one_folded, Factors::two_folded);
    for (; length >= 3 * kStrip; length -= 3 * kStrip, data += 3 * kStrip) {
        const Strips sums = sum_strips<kStrip>(state, data);
        const __m128i first = _mm_cvtsi64_si128(static_cast<long long>(sums.a));
        const __m128i second = _mm_cvtsi64_si128(static_cast<long long>(sums.b));
        const __m128i folded =
            _mm_xor_si128(_mm_clmulepi64_si128(first, factors, 0x00), _mm_clmulepi64_si128(second, factors, 0x10));
        const uint64_t shifted = _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(folded)));
        state = static_cast<uint32_t>(shifted ^ sums.c);
    }
    return state;
}

__attribute__((target("sse4.2,pclmul"))) uint32_t update_clmul(uint32_t state, const uint8_t* data, size_t length) {
    state = strips_clmul<kLongStrip>(state, data, length);
    state = strips_clmul<kShortStrip>(state, data, length);
    return update_tail(state, data, length);
}

#elif defined(__aarch64__)

#if defined(__clang__)
#define TIERKV_TARGET_CRC __attribute__((target("crc")))
#else
#define TIERKV_TARGET_CRC __attribute__((target("+crc")))
#endif

TIERKV_TARGET_CRC uint32_t update_armv8(uint32_t state, const uint8_t* data, size_t length) {
    constexpr uint32_t kOneStrip = power_of_x(8 * kLongStrip);
    constexpr uint32_t kTwoStrips = power_of_x(16 * kLongStrip);
    const auto load = [](const uint8_t* from) {
        uint64_t word;
        std::memcpy(&word, from, sizeof word);
        return word;
    };
    for (; length >= 3 * kLongStrip; length -= 3 * kLongStrip, data += 3 * kLongStrip) {
        uint32_t a = state, b = 0, c = 0;
        for (size_t offset = 0; offset < kLongStrip; offset += 8) {
            a = __crc32cd(a, load(data + offset));
            b = __crc32cd(b, load(data + kLongStrip + offset));
            c = __crc32cd(c, load(data + 2 * kLongStrip + offset));
        }
        state = multiply(a, kTwoStrips) ^ multiply(b, kOneStrip) ^ c;
    }
    for (; length >= 8; length -= 8, data += 8) state = __crc32cd(state, load(data));
    for (; length != 0; --length) state = __crc32cb(state, *data++);
    return state;
}

#endif

using Update = uint32_t (*)(uint32_t state, const uint8_t* data, size_t length);

template <Update kUpdate>
uint32_t whole(const void* data, size_t length, uint32_t value) {
    return ~kUpdate(~value, static_cast<const uint8_t*>(data), length);
}

struct Implementation {
    const char* name;
    Crc32cFunction function;
};

// Best first; entries that this CPU cannot run have no function.
std::array<Implementation, 3> implementations() {
    std::array<Implementation, 3> list{};
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool sse = __builtin_cpu_supports("sse4.2");
    list[0] = {"sse4.2+pclmul", sse && __builtin_cpu_supports("pclmul") ? whole<update_clmul> : nullptr};
    list[1] = {"sse4.2", sse ? whole<update_sse> : nullptr};
#elif defined(__aarch64__)
    list[0] = {"armv8", (getauxval(AT_HWCAP) & HWCAP_CRC32) ? whole<update_armv8> : nullptr};
#endif
    list[2] = {"portable", whole<update_portable>};
    return list;
}

Implementation best() {
    for (const Implementation& candidate : implementations()) {
        if (candidate.function != nullptr) return candidate;
    }
    return {"portable", whole<update_portable>};
}

const Implementation& chosen() {
    static const Implementation implementation = best();
    return implementation;
}

}  // namespace

uint32_t crc32c(const void* data, size_t length, uint32_t value) {
    return chosen().function(data, length, value);
}

uint32_t crc32c_portable(const void* data, size_t length, uint32_t value) {
    return whole<update_portable>(data, length, value);
}

uint32_t crc32c_combine(uint32_t first, uint32_t second, uint64_t second_length) {
    // The inversions at both ends cancel out: each contributes the same term to both sides.
    // 8 * second_length overflows for lengths of 2^61 and more, which no memory holds.
    return multiply(first, power_of_x(8 * second_length)) ^ second;
}

const char* crc32c_implementation() {
    return chosen().name;
}

Crc32cFunction crc32c_named(const char* name) {
    for (const Implementation& candidate : implementations()) {
        if (candidate.name != nullptr && std::strcmp(candidate.name, name) == 0) return candidate.function;
    }
    return nullptr;
}

}  // namespace tierkv
