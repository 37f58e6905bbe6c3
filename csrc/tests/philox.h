// Dropout by its definition, a cell at a time: Philox4x32-10 as Salmon et al. (SC 2011) write it down.
#pragma once

#include <array>
#include <cstdint>

using Words = std::array<uint32_t, 4>;

inline Words philox(Words counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t even = uint64_t{0xD2511F53u} * counter[0], odd = uint64_t{0xCD9E8D57u} * counter[2];
    counter = {uint32_t(odd >> 32) ^ counter[1] ^ key[0], uint32_t(odd),
               uint32_t(even >> 32) ^ counter[3] ^ key[1], uint32_t(even)};
    key = {key[0] + 0x9E3779B9u, key[1] + 0xBB67AE85u};
  }
  return counter;
}

// The answers that Random123 publishes (kat_vectors, philox4x32 10).
inline bool philox_gives_its_published_answers() {
  constexpr uint32_t ones = 0xFFFFFFFFu;
  return philox({0, 0, 0, 0}, {0, 0}) == Words{0x6627E8D5u, 0xE169C58Du, 0xBC57AC4Cu, 0x9B00DBD8u} &&
         philox({ones, ones, ones, ones}, {ones, ones}) ==
             Words{0x408F276Du, 0x41C83B0Eu, 0xA20BC7C6u, 0x6D5451FDu} &&
         philox({0x243F6A88u, 0x85A308D3u, 0x13198A2Eu, 0x03707344u}, {0xA4093822u, 0x299F31D0u}) ==
             Words{0xD16CFE09u, 0x94FDCCEBu, 0x5001E420u, 0x24126EA1u};
}

// What the weight of a cell is multiplied by when a share p of them is dropped; p is a multiple of 2^-32.
inline double kept_factor(double p, std::array<uint32_t, 2> key, int64_t b, int64_t h, int64_t i, int64_t j) {
  if (p == 0) return 1;
  const Words words = philox({uint32_t(j / 4), uint32_t(i), uint32_t(h), uint32_t(b)}, key);
  return words[j % 4] >= p * 0x1p32 ? 1 / (1 - p) : 0;
}

constexpr std::array<uint32_t, 2> kDropoutKey = {0x89ABCDEFu, 0xFEDCBA98u};

template <typename Problem>
void set_dropout(double p, Problem& f) {
  if (p == 0) return;
  f.kept_factor = p < 1 ? 1 / (1 - p) : 1, f.dropped_below = static_cast<uint64_t>(p * 0x1p32);
  f.dropout_key[0] = kDropoutKey[0], f.dropout_key[1] = kDropoutKey[1];
}
