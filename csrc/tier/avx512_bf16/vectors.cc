#include "abi/tiers.h"
#include "isa/avx512_bf16.h"
#include "micro/table.h"

namespace tandem {

constexpr KernelTable kAvx512Bf16Vectors =
    vectors<Avx512Bf16Isa, TileFromRows{kNever, kNever, 64, 64, 64, 64, 64, 64, 24, 64, 64, 64}>(Tier::avx512_bf16);

}  // namespace tandem
