// The dense kernels with the widest vectors of this CPU, for work whose result must not depend on the plan's tier.
#pragma once

#include "abi/dense_kernels.h"

namespace tandem {

const DenseKernels& widest_kernels();

}  // namespace tandem
