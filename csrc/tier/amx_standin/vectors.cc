// Not a tier for users: AMX's blocking on portable code, for tests.
#include "abi/tiers.h"
#include "isa/scalar_bf16.h"
#include "micro/table.h"

namespace tandem {

constexpr KernelTable kAmxStandinVectors =
    vectors<ScalarBf16Isa, TileFromRows{8, 2, 4, 4, 2, 3, 4, 4, 2, 4, 4, 4}, true>(Tier::amx_standin);

}  // namespace tandem
