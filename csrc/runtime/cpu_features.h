// What this CPU and this kernel let us execute. Compiled at baseline: safe to call anywhere.
#pragma once

#include <string>
#include <vector>

namespace tandem {

struct CpuFeatures {
  bool avx2 = false;         // AVX2 + FMA + F16C + BMI2, with the OS saving YMM state
  bool avx512 = false;       // F + BW + VL + DQ, with the OS saving ZMM state
  bool avx512_bf16 = false;  // the above + BF16 + VNNI + VBMI
  bool amx = false;          // the above + AVX512-FP16 + AMX tile, bf16 and int8, granted to this process
  std::string model;         // "AMD EPYC 9755", as the CPU names itself
};

// Looked up once; asks the OS for AMX tile state the first time.
const CpuFeatures& cpu_features();

// Names of the tiers that this host can run, slowest first, built or not; always begins with "scalar".
std::vector<std::string> cpu_tiers();

}  // namespace tandem
