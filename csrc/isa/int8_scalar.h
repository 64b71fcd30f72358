// Integer products in portable C++, and the meaning of every primitive. A Sum is 16 exact 32-bit sums, a Line 16
// columns x 4 k of bytes, an X the 4 bytes of activations that belong to it.
#pragma once

#include "isa/scalar.h"

namespace tandem {
namespace {

struct ScalarInts {
  using Isa = ScalarIsa;
  struct Sum {
    Isa::Signed v;
  };
  struct Line {
    uint8_t v[64];
  };
  struct Lines {  // the first 4 bytes of a block of 8 k, and the others
    Line a, b;
  };
  struct X {
    int8_t v[4];
  };
  static constexpr int kRows = 4;  // rows per pass
  static constexpr int kDigitRows = 4;
  static constexpr int kBlockRows = 4;  // rows per pass, where 256 k share a scale
  static constexpr int kPanels = 2;     // panels per pass
  static constexpr int kByteOffset = 128;

  TANDEM_INLINE static Sum start(int32_t value) { return {value + Isa::Signed{}}; }
  TANDEM_INLINE static void keep(Sum& s) { __asm__ volatile("" : "+m"(s)); }  // or it would be folded away
  TANDEM_INLINE static void keep(X& x) { __asm__ volatile("" : "+m"(x)); }
  TANDEM_INLINE static X x(const uint8_t* p) {
    X a;
    __builtin_memcpy(&a, p, sizeof a);
    return a;
  }
  TANDEM_INLINE static Isa::Vec floats(Sum s) { return Isa::floats(s.v); }

  // int8: 4 pairs of k, [4][16][2], to code + kByteOffset. Their sums may be in an order of their own until
  // byte_floats.
  TANDEM_INLINE static Lines bytes(const uint8_t* p) {
    Lines w;
    for (int i = 0; i < 64; ++i) {
      const int at = i % 4 / 2 * 32 + i / 4 * 2 + i % 2;
      w.a.v[i] = p[at] ^ 0x80;
      w.b.v[i] = p[64 + at] ^ 0x80;
    }
    return w;
  }
  TANDEM_INLINE static Sum dot_bytes(Sum s, const Lines& w, X a, X b) { return dot_small(s, w, a, b); }
  TANDEM_INLINE static Isa::Vec byte_floats(Sum s) { return floats(s); }

  // Lower and upper nibbles of 64 bytes.
  TANDEM_INLINE static Lines nibbles(const uint8_t* p) {
    Lines w;
    for (int i = 0; i < 64; ++i) w.a.v[i] = p[i] & 15, w.b.v[i] = p[i] >> 4;
    return w;
  }
  // Nibbles, and above each of them two bits of `high`: bits at, at + 1 for the lower ones, the next two for the upper.
  template <int at>
  TANDEM_INLINE static Lines sixes(const uint8_t* low, const uint8_t* high) {
    Lines w = nibbles(low);
    for (int i = 0; i < 64; ++i) {
      w.a.v[i] = uint8_t(w.a.v[i] | (high[i] >> at & 3) << 4);
      w.b.v[i] = uint8_t(w.b.v[i] | (high[i] >> (at + 2) & 3) << 4);
    }
    return w;
  }
  // Bits at, at + 1 of 64 bytes, and the next two.
  template <int at>
  TANDEM_INLINE static Lines twos(const uint8_t* p) {
    Lines w;
    for (int i = 0; i < 64; ++i) w.a.v[i] = p[i] >> at & 3, w.b.v[i] = p[i] >> (at + 2) & 3;
    return w;
  }
  // Codes of 3 bits of 8 k: pairs 0 and 1 of a block of 16, or 2 and 3.
  template <int half>
  TANDEM_INLINE static Lines threes(const uint8_t* words, const uint8_t* bytes) {
    Lines lines;
    for (int lane = 0; lane < 32; ++lane) {
      const int w = words[2 * lane] | words[2 * lane + 1] << 8, b = bytes[lane];
      const int last = (w >> 15) | (b >> 5 & 6), codes = half ? (w >> 12 & 7) | (b & 63) << 3 | last << 9 : w;
      for (int i = 0; i < 2; ++i) {
        lines.a.v[2 * lane + i] = codes >> 6 * i & 7;
        lines.b.v[2 * lane + i] = codes >> (6 * i + 3) & 7;
      }
    }
    return lines;
  }
  // Values + kByteOffset of nibbles.
  TANDEM_INLINE static Lines nl4(Lines w) {
    for (int i = 0; i < 64; ++i) w.a.v[i] = uint8_t(kNl4[w.a.v[i]] + 128), w.b.v[i] = uint8_t(kNl4[w.b.v[i]] + 128);
    return w;
  }
  // Two's complement to code + offset: its sign bit is the other way round.
  TANDEM_INLINE static Lines flipped(Lines w, int sign) {
    for (int i = 0; i < 64; ++i) w.a.v[i] = uint8_t(w.a.v[i] ^ sign), w.b.v[i] = uint8_t(w.b.v[i] ^ sign);
    return w;
  }
  // 2 * e2m1 + 12
  TANDEM_INLINE static Lines twice_e2m1(Lines w) {
    for (int i = 0; i < 64; ++i) {
      w.a.v[i] = uint8_t(12 + int(2 * float_of_e2m1(w.a.v[i])));
      w.b.v[i] = uint8_t(12 + int(2 * float_of_e2m1(w.b.v[i])));
    }
    return w;
  }
  // Unsigned bytes below 64 times signed ones of magnitude 127 at most.
  TANDEM_INLINE static Sum dot_small(Sum s, const Lines& w, X a, X b) {
    for (int i = 0; i < 64; ++i) s.v[i / 4] += w.a.v[i] * a.v[i % 4] + w.b.v[i] * b.v[i % 4];
    return s;
  }

  // Integers that scale groups, of 16 columns: signed bytes, lower nibbles, 2 n + 1 of nibbles from `bit` on.
  TANDEM_INLINE static Sum signed_scales(const uint8_t* p) {
    Sum s;
    for (int i = 0; i < 16; ++i) s.v[i] = int8_t(p[i]);
    return s;
  }
  TANDEM_INLINE static Sum low_nibbles(const uint8_t* p) {
    Sum s;
    for (int i = 0; i < 16; ++i) s.v[i] = p[i] & 15;
    return s;
  }
  template <int bit>
  TANDEM_INLINE static Sum odd_scales(const uint8_t* p) {
    Sum s;
    for (int i = 0; i < 16; ++i) s.v[i] = 2 * (p[i] >> bit & 15) + 1;
    return s;
  }
  TANDEM_INLINE static Sum add_product(Sum s, Sum a, Sum b) { return {s.v + a.v * b.v}; }
  // Of two groups of 16 columns: signed bytes, or upper nibbles.
  struct Shifts {
    int8_t v[32];
  };
  template <bool nibbles>
  TANDEM_INLINE static Shifts shifts(const uint8_t* p) {
    Shifts s;
    for (int i = 0; i < 32; ++i) s.v[i] = int8_t(nibbles ? p[i] >> 4 : p[i]);
    return s;
  }
  // x: two words.
  TANDEM_INLINE static Sum dot_shifts(Sum s, const Shifts& two, X x) {
    int16_t of_x[2];
    __builtin_memcpy(of_x, x.v, sizeof of_x);
    for (int i = 0; i < 16; ++i) s.v[i] += two.v[i] * of_x[0] + two.v[16 + i] * of_x[1];
    return s;
  }
  // As `bytes`, columns in a row.
  TANDEM_INLINE static Lines ordered_bytes(const uint8_t* p) { return bytes(p); }

  // 16 integral values as signed bytes, two blocks of 8, each in kSplitOrder where `split`.
  TANDEM_INLINE static void store_codes(uint8_t* p, Isa::Vec q, bool split) {
    for (int i = 0; i < 16; ++i) p[i] = uint8_t(int8_t(q.v[split ? i / 8 * 8 + kSplitOrder[i % 8] : i]));
  }

  // Activations as digits: see format/digit_row.h. 256 * high + low.
  TANDEM_INLINE static Sum joined(Sum high, Sum low) { return {256 * high.v + low.v}; }
  // The largest magnitude of several vectors, as bits: those of NaN are larger than those of any number.
  using Magnitude = uint32_t;
  TANDEM_INLINE static Magnitude no_magnitude() { return 0; }
  TANDEM_INLINE static Magnitude larger(Magnitude most, Isa::Vec v) {
    for (int i = 0; i < 16; ++i) {
      const uint32_t bits = bits_of_float(v.v[i]) & 0x7fffffffu;
      most = bits > most ? bits : most;
    }
    return most;
  }
  TANDEM_INLINE static uint32_t largest_bits(Magnitude most) { return most; }
  // 16 values, rounded to integers below 2^23, as two blocks of 3 x 8 digits, and the sums of all digits so far. NaN
  // and infinity: any digits.
  struct DigitSums {
    int32_t v[3];
  };
  TANDEM_INLINE static DigitSums no_digits() { return {}; }
  TANDEM_INLINE static DigitSums store_digits(uint8_t* p, Isa::Vec values, bool split, DigitSums sums) {
    for (int i = 0; i < 16; ++i) {
      const float value = values.v[split ? i / 8 * 8 + kSplitOrder[i % 8] : i];
      const int32_t q = value > -0x1p23f && value < 0x1p23f ? int32_t(__builtin_rintf(value)) : 0;
      for (int d = 0; d < 3; ++d) {
        const uint8_t digit = uint8_t((q + 0x808080) >> 8 * d ^ 0x80);  // with borrows: -128 to 127
        p[i / 8 * 24 + 8 * d + i % 8] = digit;
        sums.v[d] += int8_t(digit);
      }
    }
    return sums;
  }
  TANDEM_INLINE static void reduce_digits(const DigitSums& sums, int32_t* to) {
    for (int d = 0; d < 3; ++d) to[d] = sums.v[d];
  }
};

}  // namespace
}  // namespace tandem
