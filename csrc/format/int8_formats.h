// Weight formats for integer products: how a block of 8 k of one panel is decoded into two lines of 16 columns x 4
// bytes. Every byte is code + offset and never negative, or a signed byte where a tier prefers that for int8.
#pragma once

// Formats whose codes are integers, times a unit, and what decodes them.
#define TANDEM_INT8_FORMATS(X) \
  X(int8, Int8Bytes)           \
  X(int4, Int4Nibbles)         \
  X(fp4, Fp4Nibbles) X(uint4, Uint4Nibbles) X(int6, Int6Bits) X(nl4, Nl4Nibbles) X(uint2, Uint2Bits) X(int3, Int3Bits)

#include "format/int8_row.h"

namespace tandem {
namespace {

template <class Ints>
struct Int8Bytes {
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
  static constexpr int kOffset = 0;
  TANDEM_INLINE static auto decode(const uint8_t* panel, int64_t block) { return Ints::nibbles(panel + 64 * block); }
};

// Halves of integers from -12 to 12.
template <class Ints>
struct Fp4Nibbles : Int4Nibbles<Ints> {
  static constexpr int kOffset = 12;
  static constexpr float kUnit = 0.5f;
  TANDEM_INLINE static auto decode(const uint8_t* panel, int64_t block) {
    return Ints::twice_e2m1(Ints::nibbles(panel + 64 * block));
  }
};

// Bytes of up to 7 bits and a sign.
template <class Ints>
struct Nl4Nibbles : Int4Nibbles<Ints> {
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
  static constexpr int kBlockBytes = 48;
  static constexpr int kOffset = 4;
  TANDEM_INLINE static auto decode(const uint8_t* panel, int64_t block) {
    const uint8_t* both = panel + block / 2 * 96;
    return Ints::flipped(
        block % 2 ? Ints::template threes<1>(both, both + 64) : Ints::template threes<0>(both, both + 64), 4);
  }
};

}  // namespace
}  // namespace tandem
