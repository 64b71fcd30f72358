// What GGUF's codebook formats look up. Plain data, which format/grids.cc fills in.
#pragma once

#include <stdint.h>

namespace tandem {

// Codes of N entries: the places of their values among the format's own, k after k. Of 8 values 2 bits each, four in a
// byte; of IQ3's 4 values 3 bits each, two in a byte.
template <int N>
struct GridCodes {
  alignas(64) uint8_t low[N];
  alignas(64) uint8_t high[N];
};

// Of every index 8 (IQ3: 4) signed bytes, k after k. Values are such that scales are odd numbers times an eighth of a
// half: IQ3_XXS' are twice ggml's and IQ3_S' eight times; IQ1's are 8 times a code, plus 1, or from index 2048 on minus
// 1. signs: by byte, whose bit k says that value k is negative, a mask of bytes; with_eighth: by the lower 7 of 8
// bits, of which an even number are ones, all of them.
struct GridTables {
  uint64_t iq2_xxs[256], iq2_xs[512], iq2_s[1024], iq1[4096];
  uint32_t iq3_xxs[256], iq3_s[512];
  uint64_t signs[256];
  uint8_t with_eighth[128];
  GridCodes<256> iq2_xxs_bytes, iq3_xxs_bytes;
  GridCodes<512> iq2_xs_bytes, iq3_s_bytes;
  GridCodes<1024> iq2_s_bytes;
  GridCodes<2048> iq1_bytes;
};

extern const GridTables kGrids;

}  // namespace tandem
