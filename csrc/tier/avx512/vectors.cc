#include "abi/tiers.h"
#include "isa/avx512.h"
#include "micro/table.h"

namespace tandem {

constexpr KernelTable kAvx512Vectors =
    vectors<Avx512Isa, TileFromRows{kNever, kNever, kNever, 64, 32, 64, 64, 64, 24, 64, 64, 64}>(Tier::avx512);

}  // namespace tandem
