// What the units of all tiers export; runtime/tiers.h joins them. Which are linked is the build's choice
// (TANDEM_TIERS).
#pragma once

#include "abi/kernel_table.h"

namespace tandem {

extern const KernelTable kScalarVectors, kScalarIntegers;
extern const KernelTable kAvx2Vectors, kAvx2Integers;
extern const KernelTable kAvx512Vectors, kAvx512Integers;
extern const KernelTable kAvx512Bf16Vectors, kAvx512Bf16Integers;
extern const KernelTable kAmxVectors, kAmxIntegers, kAmxNibbleTiles, kAmxOtherTiles, kAmxSmallTiles;
extern const KernelTable kAmxStandinVectors, kAmxStandinIntegers, kAmxStandinNibbleTiles, kAmxStandinOtherTiles,
    kAmxStandinSmallTiles;

}  // namespace tandem
