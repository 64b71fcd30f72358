// The tables of all tiers. Choosing one that the host cannot execute is the caller's fault: see runtime/cpu_features.h.
#pragma once

#include "abi/kernel_table.h"

namespace tandem {

extern const KernelTable kScalarTable;
extern const KernelTable kAvx2Table;
extern const KernelTable kAvx512Table;
extern const KernelTable kAvx512Bf16Table;
extern const KernelTable kAmxTable;
extern const KernelTable kAmxStandinTable;

}  // namespace tandem
