// Tier "scalar": portable code, and the meaning of every primitive. Each isa header defines one struct with the same
// members; `Vec` is 16 floats everywhere. All names live in the translation unit's unnamed namespace.
//
// Vectors are the compiler's own (GCC and Clang), which it cuts into what registers there are. As arrays and loops the
// same took eight times as long to compile.
#pragma once

#include <stdint.h>

#include "abi/weight_view.h"
#include "isa/inline.h"

namespace tandem {
namespace {

struct ScalarIsa {
  using Floats = float __attribute__((vector_size(64)));
  using Quarter = float __attribute__((vector_size(16)));
  using Words = uint32_t __attribute__((vector_size(64)));
  using Signed = int32_t __attribute__((vector_size(64)));
  using Halves = uint16_t __attribute__((vector_size(32)));
  using Bytes = int8_t __attribute__((vector_size(16)));
  struct Vec {
    Floats v;
  };

  // What a row of `fmt` weights is multiplied in. One line is 64 bytes of weights for 16 output rows; `x_line`
  // broadcasts the 4 bytes of activations that belong to it.
  struct FloatLane {
    static constexpr DType kType = DType::f32;
    static constexpr int kLinesPerPair = 2;  // lines per pair of k
    using Line = Vec;
    using XLine = float;
    TANDEM_INLINE static Line load_line(const void* p) { return load(static_cast<const float*>(p)); }
    TANDEM_INLINE static void store_line(void* p, Line a) { store(static_cast<float*>(p), a); }
    TANDEM_INLINE static XLine x_line(const void* p) { return *static_cast<const float*>(p); }
    TANDEM_INLINE static Vec dot(Vec sum, Line w, XLine x) { return fma(w, set1(x), sum); }
  };
  using Lane = FloatLane;
  struct Pair {
    Lane::Line line[Lane::kLinesPerPair];
  };
  static constexpr int kDotRows = 4;   // rows per pass of dot_rows
  static constexpr int kTileRows = 4;  // rows per block of tile_mm
  static constexpr int kTilePanels = 2;

  template <class T>
  TANDEM_INLINE static T loaded(const void* p) {
    T value;
    __builtin_memcpy(&value, p, sizeof value);
    return value;
  }
  template <class F>
  TANDEM_INLINE static Vec each(F f) {
    float r[16];
    for (int i = 0; i < 16; ++i) r[i] = f(i);
    return load(r);
  }
  // By quarters: a vector of 16 equal numbers is put together in memory, one by one.
  TANDEM_INLINE static Vec set1(float a) {
    const Quarter quarter = {a, a, a, a}, all[4] = {quarter, quarter, quarter, quarter};
    return {loaded<Floats>(all)};
  }
  TANDEM_INLINE static Vec zero() { return {Floats{}}; }
  TANDEM_INLINE static Vec load(const float* p) { return {loaded<Floats>(p)}; }
  TANDEM_INLINE static void store(float* p, Vec a) { __builtin_memcpy(p, &a, sizeof a); }
  TANDEM_INLINE static Vec load_bf16(const uint16_t* p) { return {Floats(words(loaded<Halves>(p)) << 16)}; }
  TANDEM_INLINE static Vec load_f16(const uint16_t* p) {
    return each([=](int i) { return float_of_f16(p[i]); });
  }
  TANDEM_INLINE static Vec load_int8(const uint8_t* p) {
    return floats(__builtin_convertvector(loaded<Bytes>(p), Signed));
  }
  // The 4 bits of each byte from `bit` on, 0 or 4.
  TANDEM_INLINE static Vec load_nibbles(const uint8_t* p, int bit) {
    return each([=](int i) { return float(p[i] >> bit & 15); });
  }
  TANDEM_INLINE static Vec load_e8m0(const uint8_t* p) {
    return each([=](int i) { return float_of_e8m0(p[i]); });
  }
  // Without NaNs: see format/scale_table.cc.
  TANDEM_INLINE static Vec load_e4m3(const uint8_t* p) {
    return each([=](int i) { return float_of_e4m3(p[i]); });
  }
  TANDEM_INLINE static void store_bf16(uint16_t* p, Vec a) {
    const Halves bits = __builtin_convertvector(bf16_bits(a), Halves);
    __builtin_memcpy(p, &bits, sizeof bits);
  }
  // Whole numbers from -128 to 127.
  TANDEM_INLINE static void store_int8(uint8_t* p, Vec a) {
    for (int i = 0; i < 16; ++i) p[i] = uint8_t(int8_t(a.v[i]));
  }
  TANDEM_INLINE static Vec add(Vec a, Vec b) { return {a.v + b.v}; }
  TANDEM_INLINE static Vec sub(Vec a, Vec b) { return {a.v - b.v}; }
  TANDEM_INLINE static Vec mul(Vec a, Vec b) { return {a.v * b.v}; }
  TANDEM_INLINE static Vec div(Vec a, Vec b) { return {a.v / b.v}; }
  TANDEM_INLINE static Vec min(Vec a, Vec b) { return {a.v < b.v ? a.v : b.v}; }
  TANDEM_INLINE static Vec max(Vec a, Vec b) { return {a.v > b.v ? a.v : b.v}; }
  // x where a > b, y elsewhere.
  TANDEM_INLINE static Vec where_greater(Vec a, Vec b, Vec x, Vec y) { return {a.v > b.v ? x.v : y.v}; }
  // a * b + c. Two roundings here: without an FMA instruction, fmaf is a slow library call. Where a and b are bf16
  // values the product is exact and there is only one rounding all the same.
  TANDEM_INLINE static Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
  TANDEM_INLINE static Vec round(Vec a) {
    return each([=](int i) { return __builtin_rintf(a.v[i]); });
  }
  // 2^n for integral n in [-126, 127].
  TANDEM_INLINE static Vec pow2(Vec n) { return {Floats((__builtin_convertvector(n.v, Signed) + 127) << 23)}; }
  // The eight sums of XXH3, of which a stripe of 64 bytes goes into every one, and what ends a block of stripes.
  struct Sums {
    uint64_t v[8];
  };
  TANDEM_INLINE static Sums load_sums(const uint64_t* p) { return *reinterpret_cast<const Sums*>(p); }
  TANDEM_INLINE static void store_sums(uint64_t* p, Sums a) { *reinterpret_cast<Sums*>(p) = a; }
  TANDEM_INLINE static Sums mix(Sums a, const uint8_t* data, const uint8_t* secret) {
    for (int i = 0; i < 8; ++i) {
      const uint64_t word = word64(data + 8 * i), keyed = word ^ word64(secret + 8 * i);
      a.v[i ^ 1] += word;
      a.v[i] += (keyed & 0xffffffffu) * (keyed >> 32);
    }
    return a;
  }
  TANDEM_INLINE static Sums scramble(Sums a, const uint8_t* secret) {
    for (int i = 0; i < 8; ++i) a.v[i] = (a.v[i] ^ a.v[i] >> 47 ^ word64(secret + 8 * i)) * 0x9e3779b1u;
    return a;
  }
  TANDEM_INLINE static float reduce_add(Vec a) {
    float sums[16];
    store(sums, a);
    for (int step = 8; step > 0; step /= 2)
      for (int i = 0; i < step; ++i) sums[i] += sums[i + step];
    return sums[0];
  }
  static constexpr int kAttentionRows = 1;
  TANDEM_INLINE static void reduce_add_four(const Vec* a, float* out) {
    for (int i = 0; i < 4; ++i) out[i] = reduce_add(a[i]);
  }
  TANDEM_INLINE static float reduce_max(Vec a) {
    float r = a.v[0];
    for (int i = 1; i < 16; ++i) r = r > a.v[i] ? r : a.v[i];
    return r;
  }

  // Weights of two consecutive k for 16 rows, as lines of Lane.
  TANDEM_INLINE static Pair decode_bf16(const uint8_t* p) {
    const Words w = loaded<Words>(p);
    return {Vec{Floats(w << 16)}, Vec{Floats(w & 0xffff0000u)}};
  }
  TANDEM_INLINE static Pair decode_int8(const uint8_t* p) {
    const Words w = words(loaded<Halves>(p));
    return {floats(Signed(w << 24) >> 24), floats(Signed(w << 16) >> 24)};
  }
  // Pair `index` (0 to 3) of a 64-byte block of signed 4-bit codes.
  TANDEM_INLINE static Pair decode_int4(const uint8_t* p, int index) {
    const Words w = loaded<Words>(p);
    return {floats(Signed(w << (28 - 4 * index)) >> 28), floats(Signed(w << (12 - 4 * index)) >> 28)};
  }
  TANDEM_INLINE static Pair decode_uint4(const uint8_t* p, int index) {
    const Words w = loaded<Words>(p) >> 4 * index;
    return {floats(Signed(w & 15)), floats(Signed(w >> 16 & 15))};
  }
  // Pair `index` (0 to 7) of a 192-byte block of signed 6-bit codes, kInt6Unit of which are 1.
  static constexpr float kInt6Unit = 1.0f;
  TANDEM_INLINE static Pair decode_int6(const uint8_t* p, int index) {
    const Words low = loaded<Words>(p + 64 * (index / 4)) >> 4 * (index % 4);
    const Words high = loaded<Words>(p + 128) >> six_bit(index);
    const Words codes = (low & 0x000f000fu) | (high & 0x00030003u) << 4;
    return {floats((Signed(codes & 63) ^ 32) - 32), floats((Signed(codes >> 16) ^ 32) - 32)};
  }
  static constexpr float kNl4Unit = 1.0f;
  TANDEM_INLINE static Pair decode_nl4(const uint8_t* p, int index) {
    const Words w = loaded<Words>(p) >> 4 * index;
    return {each([=](int i) { return float(kNl4[w[i] & 15]); }),
            each([=](int i) { return float(kNl4[w[i] >> 16 & 15]); })};
  }
  // Of a 64-byte block of 2-bit codes.
  TANDEM_INLINE static Pair decode_uint2(const uint8_t* p, int index) {
    const Words w = loaded<Words>(p) >> six_bit(index);
    return {floats(Signed(w & 3)), floats(Signed(w >> 16 & 3))};
  }
  // Of a 96-byte block of signed 3-bit codes, kInt3Unit of which are 1.
  static constexpr float kInt3Unit = 1.0f;
  TANDEM_INLINE static Pair decode_int3(const uint8_t* p, int index) {
    const Words w = loaded<Words>(p), b = words(loaded<Halves>(p + 64));
    const Words bytes = (b & 255) | (b & 0xff00) << 8;  // under the lanes of w
    const Words seven = (w >> 15 & 0x00010001u) | (bytes >> 5 & 0x00060006u);
    const Words codes = index < 5 ? w >> 3 * index : index < 7 ? bytes >> 3 * (index - 5) : seven;
    return {floats((Signed(codes & 7) ^ 4) - 4), floats((Signed(codes >> 16 & 7) ^ 4) - 4)};
  }
  TANDEM_INLINE static Pair decode_fp8(const uint8_t* p) {
    return {each([=](int i) { return float_of_e4m3(p[2 * i]); }),
            each([=](int i) { return float_of_e4m3(p[2 * i + 1]); })};
  }
  TANDEM_INLINE static Pair decode_fp4(const uint8_t* p, int index) {
    const Words w = loaded<Words>(p) >> 4 * index;
    return {floats_of_e2m1(w), floats_of_e2m1(w >> 16)};
  }
  // 16 rows of 16 words each, `stride` bytes apart anywhere, to 16 lines of a word of every row.
  TANDEM_INLINE static void interleave(const uint8_t* rows, int64_t stride, uint8_t* lines) {
    for (int word = 0; word < 16; ++word)
      for (int r = 0; r < 16; ++r) __builtin_memcpy(lines + 64 * word + 4 * r, rows + r * stride + 4 * word, 4);
  }
  TANDEM_INLINE static void stream(float* p, const Vec& a) { store(p, a); }
  TANDEM_INLINE static void streamed() {}
  TANDEM_INLINE static void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
  TANDEM_INLINE static void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

  TANDEM_INLINE static Words words(Halves a) { return __builtin_convertvector(a, Words); }
  TANDEM_INLINE static Vec floats(Signed a) { return {__builtin_convertvector(a, Floats)}; }
  // As float_of_e2m1. Codes below 2 have no exponent.
  TANDEM_INLINE static Vec floats_of_e2m1(Words codes) {
    const Words large = Words(Signed(0 - (codes & 6)) >> 31);
    const Words size = (large & (((codes & 7) << 22) + 0x3f000000u)) | (~large & (0 - (codes & 1)) & 0x3f000000u);
    return {Floats(size | (codes & 8) << 28)};
  }
  // As bf16_of_float. NaNs by their sign in a subtraction: a choice between vectors is made number by number.
  TANDEM_INLINE static Words bf16_bits(Vec a) {
    const Words bits = Words(a.v), nan = Words(Signed(0x7f800000u - (bits & 0x7fffffffu)) >> 31);
    const Words rounded = bits + 0x7fff + (bits >> 16 & 1), quiet = bits | 0x400000;
    return ((rounded & ~nan) | (quiet & nan)) >> 16;
  }
};

}  // namespace
}  // namespace tandem
