#include "runtime/cpu_features.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tandem {
namespace {

#if defined(__x86_64__)

struct Leaf {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Leaf cpuid(uint32_t leaf, uint32_t subleaf = 0) {
  Leaf r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);  // leaves zeros if the CPU has no such leaf
  return r;
}

bool has(uint32_t reg, std::initializer_list<int> bits) {
  for (int bit : bits)
    if (!(reg >> bit & 1)) return false;
  return true;
}

// XCR0: which register state the OS saves. Only valid when CPUID.1:ECX.OSXSAVE is set.
uint64_t saved_state() {
  if (!has(cpuid(1).ecx, {27})) return 0;
  uint32_t lo, hi;
  __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
  return uint64_t{hi} << 32 | lo;
}

// Linux gives tile registers (8 KiB more per signal frame) only to processes that ask.
bool ask_for_tile_state() {
  constexpr int kArchReqXcompPerm = 0x1023, kXfeatureTileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureTileData) == 0;
}

std::string brand() {
  char text[49] = {};
  for (uint32_t i = 0; i < 3; ++i) {
    const Leaf r = cpuid(0x80000002 + i);
    std::memcpy(text + 16 * i, &r, 16);
  }
  std::string name(text);
  name.erase(0, name.find_first_not_of(' ') == std::string::npos ? name.size() : name.find_first_not_of(' '));
  name.erase(name.find_last_not_of(' ') + 1);
  return name;
}

// Bit numbers: Intel SDM volume 2A, table of CPUID leaves 1 and 7.
CpuFeatures detect() {
  const Leaf one = cpuid(1), seven = cpuid(7), seven1 = cpuid(7, 1);
  const uint64_t state = saved_state();
  const bool ymm = (state & 0x6) == 0x6, zmm = (state & 0xe6) == 0xe6, tiles = (state >> 17 & 3) == 3;
  CpuFeatures f;
  f.model = brand();
  f.avx2 = ymm && has(one.ecx, {12, 28, 29}) && has(seven.ebx, {3, 5, 8});      // FMA AVX F16C; BMI AVX2 BMI2
  f.avx512 = f.avx2 && zmm && has(seven.ebx, {16, 17, 30, 31});                 // F DQ BW VL
  f.avx512_bf16 = f.avx512 && has(seven.ecx, {1, 11}) && has(seven1.eax, {5});  // VBMI VNNI; BF16
  f.amx =
      f.avx512_bf16 && tiles && has(seven.edx, {22, 23, 24, 25}) && ask_for_tile_state();  // BF16 AVX512-FP16 TILE INT8
  return f;
}

#else

CpuFeatures detect() { return {}; }

#endif

}  // namespace

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = detect();
  return features;
}

std::vector<std::string> cpu_tiers() {
  const CpuFeatures& f = cpu_features();
  std::vector<std::string> tiers{"scalar"};
  if (f.avx2) tiers.push_back("avx2");
  if (f.avx512) tiers.push_back("avx512");
  if (f.avx512_bf16) tiers.push_back("avx512_bf16");
  if (f.amx) tiers.push_back("amx");
  return tiers;
}

}  // namespace tandem
