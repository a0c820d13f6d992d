// crc32c: known values, equality of all implementations, chaining and combining.
#include <cstring>
#include <random>
#include <vector>

#include "check.hpp"
#include "checksum.hpp"

using namespace tierkv;

namespace {

// The definition, a bit at a time.
uint32_t by_definition(const uint8_t* data, size_t length, uint32_t value) {
    uint32_t state = ~value;
    for (size_t k = 0; k < length; ++k) {
        state ^= data[k];
        for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ ((state & 1) ? 0x82F63B78 : 0);
    }
    return ~state;
}

std::vector<Crc32cFunction> implementations() {
    std::vector<Crc32cFunction> found{crc32c, crc32c_portable};
    for (const char* name : {"sse4.2+pclmul", "sse4.2", "armv8", "portable"}) {
        if (Crc32cFunction function = crc32c_named(name)) found.push_back(function);
    }
    return found;
}

std::vector<uint8_t> random_bytes(size_t size, uint32_t seed) {
    std::mt19937 random(seed);
    std::vector<uint8_t> bytes(size);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    return bytes;
}

}  // namespace

TEST(known_values) {
    // From RFC 3720, appendix B.4, and the usual check value.
    const std::vector<uint8_t> zeros(32, 0), ones(32, 0xFF);
    std::vector<uint8_t> rising(32), falling(32);
    for (uint8_t k = 0; k < 32; ++k) rising[k] = k, falling[k] = static_cast<uint8_t>(31 - k);
    for (const Crc32cFunction function : implementations()) {
        CHECK(function("123456789", 9, 0) == 0xE3069283);
        CHECK(function(zeros.data(), 32, 0) == 0x8A9136AA);
        CHECK(function(ones.data(), 32, 0) == 0x62A8AB43);
        CHECK(function(rising.data(), 32, 0) == 0x46DD794E);
        CHECK(function(falling.data(), 32, 0) == 0x113FDB5C);
        CHECK(function(nullptr, 0, 0) == 0 && function(nullptr, 0, 77) == 77);
    }
}

TEST(implementations_agree) {
    const std::vector<uint8_t> bytes = random_bytes(40'000, 1);
    std::mt19937 random(2);
    std::vector<size_t> lengths;
    for (size_t length = 0; length < 300; ++length) lengths.push_back(length);
    // Around the lengths of the strips that are summed side by side.
    for (const size_t edge : {768, 1536, 12'288, 24'576}) {
        for (size_t length = edge - 9; length <= edge + 9; ++length) lengths.push_back(length);
    }
    for (const size_t length : lengths) {
        const size_t offset = random() % 64;
        const uint32_t start = length % 3 == 0 ? 0 : static_cast<uint32_t>(random());
        const uint32_t expected = by_definition(bytes.data() + offset, length, start);
        for (const Crc32cFunction function : implementations())
            CHECK(function(bytes.data() + offset, length, start) == expected);
    }
}

TEST(going_on_and_combining) {
    const std::vector<uint8_t> bytes = random_bytes(30'000, 3);
    std::mt19937 random(4);
    const uint32_t whole = crc32c(bytes.data(), bytes.size());
    for (int round = 0; round < 200; ++round) {
        const size_t cut = random() % (bytes.size() + 1);
        const uint32_t first = crc32c(bytes.data(), cut);
        CHECK(crc32c(bytes.data() + cut, bytes.size() - cut, first) == whole);
        CHECK(crc32c_combine(first, crc32c(bytes.data() + cut, bytes.size() - cut), bytes.size() - cut) == whole);
    }
}

TEST(every_flipped_bit_shows) {
    std::vector<uint8_t> bytes = random_bytes(13'000, 5);
    const uint32_t whole = crc32c(bytes.data(), bytes.size());
    std::mt19937 random(6);
    for (int round = 0; round < 2'000; ++round) {
        const size_t bit = random() % (bytes.size() * 8);
        bytes[bit / 8] ^= static_cast<uint8_t>(1 << (bit % 8));
        CHECK(crc32c(bytes.data(), bytes.size()) != whole);
        bytes[bit / 8] ^= static_cast<uint8_t>(1 << (bit % 8));
    }
}

TEST(a_name_is_found) {
    CHECK(crc32c_named(crc32c_implementation()) != nullptr);
    CHECK(crc32c_named("portable") != nullptr);
    CHECK(crc32c_named("crc64") == nullptr);
}

RUN_TESTS()
