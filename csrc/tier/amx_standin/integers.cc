#include "abi/tiers.h"
#include "isa/int8_scalar.h"
#include "micro/digit_rows.h"
#include "micro/int8_rows.h"

namespace tandem {

constexpr KernelTable kAmxStandinIntegers = with_digits<ScalarInts>(
    int8_activations<ScalarInts>(Tier::amx_standin, kInt8BelowTiles), kDigitsBelowTiles, kDigitsBelowTilesOfGroups);

}  // namespace tandem
