// The hash function of the index's table.
//
// It mixes all 32 bytes of a block's hash, the keyspace and a seed, so that keys with equal beginnings (or, from an
// engine with a weak hash, hardly any difference) spread evenly. Thread safety: immutable.
#pragma once

#include <cstdint>
#include <cstring>

namespace tierkv {

// splitmix64: the next of a sequence of well-mixed words.
inline uint64_t splitmix64(uint64_t& state) {
    state += 0x9E3779B97F4A7C15;
    uint64_t word = state;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB;
    return word ^ (word >> 31);
}

class Mixer {
  public:
    explicit Mixer(uint64_t seed) {
        for (uint64_t& key : keys_) key = splitmix64(seed) | 1;
    }

    uint64_t operator()(const uint8_t* hash, uint32_t space) const {
        uint64_t words[4];
        std::memcpy(words, hash, sizeof words);
        const uint64_t front = fold(words[0] ^ keys_[0], words[1] ^ keys_[1]);
        const uint64_t back = fold(words[2] ^ keys_[2], words[3] ^ keys_[3]);
        return fold(front ^ keys_[4] ^ (uint64_t{space} << 17), back ^ keys_[5] ^ (uint64_t{space} << 5));
    }

  private:
    // The two halves of the product, folded: every bit of both factors reaches every bit of the result.
    static uint64_t fold(uint64_t a, uint64_t b) {
        const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
        return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
    }

    uint64_t keys_[6];
};

}  // namespace tierkv
