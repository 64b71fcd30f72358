#include "abi/grids.h"

#include "format/grid_codes.h"

namespace tandem {
namespace {

// Value k of an entry is values[its code], in byte k.
constexpr uint64_t bytes_of(uint64_t codes, int count, int bits, const int (&values)[8]) {
  uint64_t bytes = 0;
  for (int k = 0; k < count; ++k) bytes |= uint64_t(uint8_t(values[codes >> bits * k & ((1u << bits) - 1)])) << 8 * k;
  return bytes;
}

constexpr uint64_t mask_of(int signs) {
  uint64_t mask = 0;
  for (int k = 0; k < 8; ++k) mask |= (signs >> k & 1 ? uint64_t{255} : 0) << 8 * k;
  return mask;
}

constexpr int with_parity(int seven) {
  int ones = 0;
  for (int k = 0; k < 7; ++k) ones += seven >> k & 1;
  return seven | (ones & 1) << 7;
}

constexpr int kIq2Values[8] = {8, 25, 43}, kAbove[8] = {-7, 1, 9}, kBelow[8] = {-9, -1, 7};
constexpr int kIq3XxsValues[8] = {8, 24, 40, 56, 72, 88, 104, 124}, kIq3SValues[8] = {8, 24, 40, 56, 72, 88, 104, 120};

template <int N>
constexpr GridCodes<N> split(const uint16_t (&entries)[N], int bits) {
  GridCodes<N> codes{};
  for (int i = 0; i < N; ++i) {
    codes.low[i] = uint8_t(entries[i] & ((1 << bits) - 1));
    codes.high[i] = uint8_t(entries[i] >> bits);
  }
  return codes;
}

constexpr GridTables grid_tables() {
  GridTables tables{};
  tables.iq2_xxs_bytes = split(kIq2Xxs, 8), tables.iq2_xs_bytes = split(kIq2Xs, 8);
  tables.iq2_s_bytes = split(kIq2S, 8), tables.iq1_bytes = split(kIq1, 8);
  tables.iq3_xxs_bytes = split(kIq3Xxs, 6), tables.iq3_s_bytes = split(kIq3S, 6);
  for (int i = 0; i < 256; ++i) tables.iq2_xxs[i] = bytes_of(kIq2Xxs[i], 8, 2, kIq2Values);
  for (int i = 0; i < 512; ++i) tables.iq2_xs[i] = bytes_of(kIq2Xs[i], 8, 2, kIq2Values);
  for (int i = 0; i < 1024; ++i) tables.iq2_s[i] = bytes_of(kIq2S[i], 8, 2, kIq2Values);
  for (int i = 0; i < 4096; ++i) tables.iq1[i] = bytes_of(kIq1[i % 2048], 8, 2, i < 2048 ? kAbove : kBelow);
  for (int i = 0; i < 256; ++i) tables.iq3_xxs[i] = uint32_t(bytes_of(kIq3Xxs[i], 4, 3, kIq3XxsValues));
  for (int i = 0; i < 512; ++i) tables.iq3_s[i] = uint32_t(bytes_of(kIq3S[i], 4, 3, kIq3SValues));
  for (int i = 0; i < 256; ++i) tables.signs[i] = mask_of(i);
  for (int i = 0; i < 128; ++i) tables.with_eighth[i] = uint8_t(with_parity(i));
  return tables;
}

}  // namespace

constexpr GridTables kGrids = grid_tables();

}  // namespace tandem
