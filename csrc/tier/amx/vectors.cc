#include "abi/tiers.h"
#include "isa/avx512_bf16.h"
#include "micro/table.h"

namespace tandem {

constexpr KernelTable kAmxVectors =
    vectors<Avx512Bf16Isa, TileFromRows{8, 2, 4, 4, 2, 3, 4, 4, 2, 4, 4, 4}, true>(Tier::amx);

}  // namespace tandem
