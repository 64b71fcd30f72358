// Weight formats for integer products: how a block of 8 k of one panel is decoded into two lines of 16 columns x 4
// bytes. Every byte is code + offset and never negative, or a signed byte where a tier prefers that for int8.
#pragma once

// Formats whose codes are integers, times a unit, and what decodes them.
#define TANDEM_INT8_FORMATS(X) \
  X(int8, Int8Bytes)           \
  X(int4, Int4Nibbles)         \
  X(fp4, Fp4Nibbles) X(uint4, Uint4Nibbles) X(int6, Int6Bits) X(nl4, Nl4Nibbles) X(uint2, Uint2Bits) X(int3, Int3Bits)

// Codebooks, whose scales always share halves.
#define TANDEM_INT8_GRID_FORMATS(X) \
  X(iq2_xxs, Iq2XxsBytes)           \
  X(iq2_xs, Iq2XsBytes) X(iq2_s, Iq2SBytes) X(iq3_xxs, Iq3XxsBytes) X(iq3_s, Iq3SBytes) X(iq1, Iq1Bytes)

#include "format/int8_row.h"

namespace tandem {
namespace {

// Calls each(p, k, lines) for 32 k of P panels.
template <class Codes, int P, class Each>
TANDEM_INLINE void eight_by_eight(const uint8_t* first, int64_t second, Each each) {
#pragma GCC unroll 4
  for (int b = 0; b < 4; ++b)
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) each(p, int(kInt8Block) * b, Codes::decode(first + p * second, b));
}

template <class Ints>
struct Int8Bytes {
  static constexpr Format kFormat = Format::int8;
  static constexpr int kBlockBytes = 128;  // of payload, per panel
  static constexpr int kOffset = Ints::kByteOffset;
  static constexpr bool kSplit = false;  // see kSplitOrder
  static constexpr float kUnit = 1.0f;
  TANDEM_INLINE static auto decode(const uint8_t* panel, int64_t block) { return Ints::bytes(panel + 128 * block); }
  TANDEM_INLINE static auto dot(typename Ints::Sum sum, const typename Ints::Lines& w, typename Ints::X a,
                                typename Ints::X b) {
    return Ints::dot_bytes(sum, w, a, b);
  }
  TANDEM_INLINE static auto floats(typename Ints::Sum sum) { return Ints::byte_floats(sum); }
};

// Codes below 64.
template <class Ints>
struct Int4Nibbles {
  static constexpr Format kFormat = Format::int4;
  static constexpr int kAtOnce = Ints::kPanels;
  static constexpr int kBlockBytes = 64;
  static constexpr int kOffset = 8;
  static constexpr bool kSplit = true;
  static constexpr float kUnit = 1.0f;
  TANDEM_INLINE static auto decode(const uint8_t* panel, int64_t block) {
    return Ints::flipped(Ints::nibbles(panel + 64 * block), 8);
  }
  TANDEM_INLINE static auto dot(typename Ints::Sum sum, const typename Ints::Lines& w, typename Ints::X a,
                                typename Ints::X b) {
    return Ints::dot_small(sum, w, a, b);
  }
  TANDEM_INLINE static auto floats(typename Ints::Sum sum) { return Ints::floats(sum); }
};

template <class Ints>
struct Uint4Nibbles : Int4Nibbles<Ints> {
  static constexpr Format kFormat = Format::uint4;
  static constexpr int kOffset = 0;
  TANDEM_INLINE static auto decode(const uint8_t* panel, int64_t block) { return Ints::nibbles(panel + 64 * block); }
};

// Halves of integers from -12 to 12.
template <class Ints>
struct Fp4Nibbles : Int4Nibbles<Ints> {
  static constexpr Format kFormat = Format::fp4;
  static constexpr int kOffset = 12;
  static constexpr float kUnit = 0.5f;
  TANDEM_INLINE static auto decode(const uint8_t* panel, int64_t block) {
    return Ints::twice_e2m1(Ints::nibbles(panel + 64 * block));
  }
};

// Bytes of up to 7 bits and a sign.
template <class Ints>
struct Nl4Nibbles : Int4Nibbles<Ints> {
  static constexpr Format kFormat = Format::nl4;
  static constexpr int kOffset = Ints::kByteOffset;
  TANDEM_INLINE static auto decode(const uint8_t* panel, int64_t block) {
    return Ints::nl4(Ints::nibbles(panel + 64 * block));
  }
  TANDEM_INLINE static auto dot(typename Ints::Sum sum, const typename Ints::Lines& w, typename Ints::X a,
                                typename Ints::X b) {
    return Ints::dot_bytes(sum, w, a, b);
  }
};

// Blocks of 16 k: two of nibbles, then the upper bits of both.
template <class Ints>
struct Int6Bits : Int4Nibbles<Ints> {
  static constexpr Format kFormat = Format::int6;
  static constexpr int kBlockBytes = 96;
  static constexpr int kOffset = 32;
  TANDEM_INLINE static auto decode(const uint8_t* panel, int64_t block) {
    const uint8_t* both = panel + block / 2 * 192;
    return Ints::flipped(
        block % 2 ? Ints::template sixes<4>(both + 64, both + 128) : Ints::template sixes<0>(both, both + 128), 32);
  }
};

// Blocks of 16 k.
template <class Ints>
struct Uint2Bits : Int4Nibbles<Ints> {
  static constexpr Format kFormat = Format::uint2;
  static constexpr int kBlockBytes = 32;
  static constexpr int kOffset = 0;
  TANDEM_INLINE static auto decode(const uint8_t* panel, int64_t block) {
    const uint8_t* both = panel + block / 2 * 64;
    return block % 2 ? Ints::template twos<4>(both) : Ints::template twos<0>(both);
  }
};

// Likewise: of words, then of bytes.
template <class Ints>
struct Int3Bits : Int4Nibbles<Ints> {
  static constexpr Format kFormat = Format::int3;
  static constexpr int kBlockBytes = 48;
  static constexpr int kOffset = 4;
  TANDEM_INLINE static auto decode(const uint8_t* panel, int64_t block) {
    const uint8_t* both = panel + block / 2 * 96;
    return Ints::flipped(
        block % 2 ? Ints::template threes<1>(both, both + 64) : Ints::template threes<0>(both, both + 64), 4);
  }
};

// Codebooks: signed values + the offset.
template <class Ints, Format kGrid>
struct CodebookBytes {
  static constexpr Format kFormat = kGrid;
  static constexpr int kBlockBytes = grid_block_bytes(kGrid);
  static constexpr int kOffset = Ints::kByteOffset;
  static constexpr bool kSplit = false;
  static constexpr int kAtOnce = 1;
  TANDEM_INLINE static auto dot(typename Ints::Sum sum, const typename Ints::Lines& w, typename Ints::X a,
                                typename Ints::X b) {
    return Ints::dot_bytes(sum, w, a, b);
  }
};
template <class Ints>
struct Iq2XxsBytes : CodebookBytes<Ints, Format::iq2_xxs> {};
template <class Ints>
struct Iq2XsBytes : CodebookBytes<Ints, Format::iq2_xs> {};
template <class Ints>
struct Iq2SBytes : CodebookBytes<Ints, Format::iq2_s> {};
template <class Ints>
struct Iq3XxsBytes : CodebookBytes<Ints, Format::iq3_xxs> {};
template <class Ints>
struct Iq3SBytes : CodebookBytes<Ints, Format::iq3_s> {};
template <class Ints>
struct Iq1Bytes : CodebookBytes<Ints, Format::iq1> {};

// Calls each(p, k, lines) for 32 k of P panels, `second` bytes apart; of codebooks one.
template <class Ints, class Codes, int P, class Each>
TANDEM_INLINE void each_eight(const uint8_t* first, int64_t second, Each each) {
  if constexpr (!is_grid(Codes::kFormat)) {
    eight_by_eight<Codes, P>(first, second, each);
  } else if constexpr (requires { Ints::kGridBytes; }) {
    Ints::template grid_bytes<Codes::kFormat>(first, each);
  } else {  // by way of int8's layout
    alignas(64) uint8_t bytes[4 * kExpandedBytes];
    expand_grids<Codes::kFormat>(first, 4, bytes);
#pragma GCC unroll 4
    for (int b = 0; b < 4; ++b) each(0, int(kInt8Block) * b, Ints::ordered_bytes(bytes + kExpandedBytes * b));
  }
}

}  // namespace
}  // namespace tandem
