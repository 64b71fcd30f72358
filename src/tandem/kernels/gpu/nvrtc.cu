// What our CUDA kernels have in common.
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;

__device__ inline float low_half(u32 pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_half(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
// As bfloat16; NaN is 0x7fff.
__device__ inline u32 rounded_pair(float low, float high) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
__device__ inline u16 rounded(float v) { return u16(rounded_pair(v, 0.0f)); }
__device__ inline float as_bf16(float v) { return low_half(rounded_pair(v, 0.0f)); }

// A word that another device, or the CPU, writes and reads: all that was written before it is seen with it.
__device__ inline u32 read_word(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ inline void write_word(u32* p, u32 v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(p), "r"(v) : "memory");
}
__device__ inline u64 nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// Overlapping kernels (kernels/gpu/dependent_launch.py).
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
