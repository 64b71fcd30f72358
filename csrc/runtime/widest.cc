#include "runtime/widest.h"

#include "runtime/cpu_features.h"

namespace tandem {

const DenseKernels& widest_kernels() {
  const CpuFeatures& cpu = cpu_features();
  if (cpu.avx512_bf16) return kAvx512Bf16Dense;
  if (cpu.avx512) return kAvx512Dense;
  return cpu.avx2 ? kAvx2Dense : kScalarDense;
}

}  // namespace tandem
