// Of a pair of bfloat16.
__device__ inline u32 minus_136(u32 pair) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(pair), "r"(0x3f803f80u), "r"(0xc308c308u));
  return d;
}
// (a & b) ^ c in one instruction. Where b and c are constants, the compiler makes two of it, and an SM does half as
// many of these as of floating point.
__device__ inline u32 and_xor(u32 a, u32 b, u32 c) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
// a: 16 x 16, b: 16 x 8, both bf16; c: 16 x 8.
__device__ inline void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// The same, of nothing before.
__device__ inline void mma_alone(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
}
// 32 k of rows 2 g and 2 g + 1 of a panel as they lie there, 8 k of each for lane t, and both rows' scale.
struct Step {
#if FORMAT == 1 || FORMAT == 3
  uint2 codes;
#elif FORMAT == 4  // bfloat16: a pair of each row
  uint2 codes[4];
#else
  u32 codes[4];
#endif
#if SCALE == 0
  uint2 scales;
#elif SCALE != 4  // 4: there are none
  u32 scales;
#endif
};

// Of a pair of bfloat16 and a pair of powers of two.
__device__ inline u32 times(u32 pair, u32 factors) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(pair), "r"(factors), "r"(0x80008000u));
  return d;
}
__device__ inline float of_half(u32 bits) {
  float f;
  asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(f) : "r"(bits));
  return f;
}

// k 2 i and 2 i + 1 of a word of nibbles, as a pair of bfloat16.
__device__ inline u32 pair_of_nibbles(u32 word, int i) {
#if FORMAT == 1  // their bits under the exponent of 128 are 128 + code + 8
  return minus_136(and_xor(word >> 4 * i, 0x000f000fu, 0x43084308u));
#else  // the bits of numbers 2^126 times smaller
  const u32 codes = word >> 4 * i;
  return times((codes & 0x00070007u) << 6 | (codes & 0x00080008u) << 12, 0x7e807e80u);
#endif
}

// Bytes FIRST and FIRST + 1, likewise.
template <int FIRST>
__device__ inline u32 pair_of_bytes(u32 word) {
#if FORMAT == 0  // 2^23 + code + 128 in the mantissa of a float; the number needs no more bits than bfloat16 has
  const u32 codes = word ^ 0x80808080u;
  const float low = __uint_as_float(__byte_perm(codes, 0x4b000000u, 0x7650 + FIRST)) - 8388736.0f;
  const float high = __uint_as_float(__byte_perm(codes, 0x4b000000u, 0x7651 + FIRST)) - 8388736.0f;
  return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
#else  // the bits of numbers 2^120 times smaller
  const u32 codes = __byte_perm(word, 0, FIRST ? 0x3424 : 0x1404);
  return times((codes >> 4 & 0x07f007f0u) | (codes & 0x80008000u), 0x7b807b80u);
#endif
}

// Pairs 0 to 3 of row 2 g and of row 2 g + 1.
__device__ inline void decode(const Step& s, u32 (&upper)[4], u32 (&lower)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#if FORMAT == 1 || FORMAT == 3
    upper[i] = pair_of_nibbles(s.codes.x, i);
    lower[i] = pair_of_nibbles(s.codes.y, i);
#elif FORMAT == 4
    upper[i] = s.codes[i].x;
    lower[i] = s.codes[i].y;
#else
    upper[i] = pair_of_bytes<0>(s.codes[i]);
    lower[i] = pair_of_bytes<2>(s.codes[i]);
#endif
  }
}

__device__ inline float scale_of(const Step& s, int row) {
#if SCALE == 0
  return __uint_as_float(row ? s.scales.y : s.scales.x);
#elif SCALE == 1
  return row ? high_half(s.scales) : low_half(s.scales);
#elif SCALE == 2
  return of_half(s.scales >> 16 * row);
#elif SCALE == 4
  return 1.0f;
#else  // 0 is a subnormal, 255 NaN
  const u32 byte = s.scales >> 8 * row & 255;
  return __uint_as_float(byte << 23 | (byte == 0 || byte == 255 ? 0x400000u : 0u));
#endif
}

// Those of rows 2 g and 2 g + 1, from where a group's begin.
__device__ inline void read_scales(Step& s, const u8* group, int g) {
#if SCALE == 0
  s.scales = *reinterpret_cast<const uint2*>(group + 8 * g);
#elif SCALE == 3
  s.scales = *reinterpret_cast<const u16*>(group + 2 * g);
#elif SCALE != 4
  s.scales = *reinterpret_cast<const u32*>(group + 4 * g);
#endif
}

// A step whose codes lie there for this lane, and whose scales for its rows.
__device__ inline Step step_at(const u8* codes, const u8* scales) {
  Step s = {};
#if FORMAT == 1 || FORMAT == 3
  s.codes = *reinterpret_cast<const uint2*>(codes);
#elif FORMAT == 4
#pragma unroll
  for (int i = 0; i < 4; ++i) s.codes[i] = *reinterpret_cast<const uint2*>(codes + 64 * i);
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) s.codes[i] = *reinterpret_cast<const u32*>(codes + 32 * i);
#endif
  if (GROUPED) read_scales(s, scales, 0);
  return s;
}

#if FORMAT == 1 || FORMAT == 3
enum { STEP_BYTES = 256, LANE_BYTES = 64, ROW_BYTES = 8 };
#elif FORMAT == 4
enum { STEP_BYTES = 1024, LANE_BYTES = 256, ROW_BYTES = 8 };
#else
enum { STEP_BYTES = 512, LANE_BYTES = 128, ROW_BYTES = 4 };
#endif
enum { PAIR_BYTES = GROUP_BYTES / 8 };  // of two rows' scales

// A step of a panel whose scales begin at `scale_at`, 2^group_shift steps for each.
__device__ inline Step step_of(const u8* panel, u64 scale_at, int group_shift, int step, int g, int t) {
  return step_at(panel + STEP_BYTES * step + LANE_BYTES * t + ROW_BYTES * g,
                 panel + scale_at + u64(step >> group_shift) * GROUP_BYTES + PAIR_BYTES * g);
}
