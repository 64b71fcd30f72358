"""What the CUDA kernels on tensor cores have in common: products, pairs of bfloat16, and overlapping (`overlap.py`)."""

from __future__ import annotations

COMMON = r"""
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;

// Of a pair of bfloat16.
__device__ inline u32 minus_136(u32 pair) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(pair), "r"(0x3f803f80u), "r"(0xc308c308u));
  return d;
}
// a: 16 x 16, b: 16 x 8, both bf16; c: 16 x 8.
__device__ inline void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ inline float low_half(u32 pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_half(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ inline u16 rounded(float v) {
  if (v != v) return 0x7fff;  // a GPU's own NaN is 0x7fffffff: adding to it would make it -0
  const u32 bits = __float_as_uint(v);
  return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Overlapping kernels (kernels/gpu/overlap.py).
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}
__device__ inline void start_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
#endif
}
"""
