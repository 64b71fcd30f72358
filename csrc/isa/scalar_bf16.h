// The scalar tier with bf16 lanes: the meaning of vdpbf16ps-style tiers in portable code, for the AMX stand-in.
#pragma once

#include "isa/scalar.h"

namespace tandem {
namespace {

// What is long here and used in many places is not inlined, or it would be most of what is compiled.
#define TANDEM_CALLED __attribute__((noinline))

struct ScalarBf16Isa : ScalarIsa {
  struct Lane {
    struct Line {
      Words v;  // a bf16 number of an even k, and above it one of the odd k
    };
    struct XLine {
      float even, odd;
    };
    static constexpr DType kType = DType::bf16;
    static constexpr int kLinesPerPair = 1;
    TANDEM_INLINE static Line load_line(const void* p) { return {loaded<Words>(p)}; }
    TANDEM_INLINE static void store_line(void* p, Line a) { __builtin_memcpy(p, &a, sizeof a); }
    TANDEM_INLINE static XLine x_line(const void* p) {
      const uint16_t* x = static_cast<const uint16_t*>(p);
      return {float_of_bf16(x[0]), float_of_bf16(x[1])};
    }
    TANDEM_INLINE static Vec dot(Vec sum, Line w, XLine x) {
      return {(sum.v + Floats(w.v << 16) * set1(x.even).v) + Floats(w.v & 0xffff0000u) * set1(x.odd).v};
    }
  };
  struct Pair {
    Lane::Line line[Lane::kLinesPerPair];
  };

  TANDEM_INLINE static Pair decode_bf16(const uint8_t* p) { return {Lane::load_line(p)}; }
  TANDEM_CALLED static Pair decode_int8(const uint8_t* p) { return {join(ScalarIsa::decode_int8(p))}; }
  TANDEM_CALLED static Pair decode_int4(const uint8_t* p, int index) {
    return {join(ScalarIsa::decode_int4(p, index))};
  }
  TANDEM_CALLED static Pair decode_uint4(const uint8_t* p, int index) {
    return {join(ScalarIsa::decode_uint4(p, index))};
  }
  TANDEM_CALLED static Pair decode_int6(const uint8_t* p, int index) {
    return {join(ScalarIsa::decode_int6(p, index))};
  }
  TANDEM_CALLED static Pair decode_nl4(const uint8_t* p, int index) { return {join(ScalarIsa::decode_nl4(p, index))}; }
  TANDEM_CALLED static Pair decode_uint2(const uint8_t* p, int index) {
    return {join(ScalarIsa::decode_uint2(p, index))};
  }
  TANDEM_CALLED static Pair decode_int3(const uint8_t* p, int index) {
    return {join(ScalarIsa::decode_int3(p, index))};
  }
  TANDEM_CALLED static Pair decode_fp8(const uint8_t* p) { return {join(ScalarIsa::decode_fp8(p))}; }
  TANDEM_CALLED static Pair decode_fp4(const uint8_t* p, int index) { return {join(ScalarIsa::decode_fp4(p, index))}; }

  using Widened = ScalarIsa;
  TANDEM_CALLED static Lane::Line line_of(Vec even, Vec odd) { return join({{even, odd}}); }

 private:
  TANDEM_INLINE static Lane::Line join(const ScalarIsa::Pair& pair) {
    return {bf16_bits(pair.line[0]) | bf16_bits(pair.line[1]) << 16};
  }
};

}  // namespace
}  // namespace tandem
