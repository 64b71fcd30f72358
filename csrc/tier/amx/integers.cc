#include "abi/tiers.h"
#include "isa/int8_vnni.h"
#include "micro/digit_rows.h"
#include "micro/int8_rows.h"

namespace tandem {

constexpr KernelTable kAmxIntegers = with_digits<VnniInts>(int8_activations<VnniInts>(Tier::amx, kInt8BelowTiles),
                                                           kDigitsBelowTiles, kDigitsBelowTilesOfGroups);

}  // namespace tandem
