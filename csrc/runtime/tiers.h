// The kernels that this process can use: those that were built, on a CPU that runs them.
#pragma once

#include <string>
#include <vector>

#include "abi/dense_kernels.h"

namespace tandem {

// Names of the tiers whose matrix kernels were built, slowest first; "amx_standin", which is for tests, is last.
std::vector<std::string> built_tiers();

// Those of them that this CPU runs, but for "amx_standin"; always begins with "scalar".
std::vector<std::string> supported_tiers();

// Both throw std::invalid_argument if there is no such tier, if this CPU cannot run it, or if it was not built, and say
// what to do. Dense kernels are always built.
const KernelTable& table_of_tier(const std::string& tier);
const DenseKernels& dense_kernels(const std::string& tier);

// The dense kernels with the widest vectors of this CPU, for work whose result must not depend on the plan's tier.
const DenseKernels& widest_kernels();

}  // namespace tandem
