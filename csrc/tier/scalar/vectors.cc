#include "abi/tiers.h"
#include "isa/scalar.h"
#include "micro/table.h"

namespace tandem {

constexpr KernelTable kScalarVectors =
    vectors<ScalarIsa, TileFromRows{8, 8, 8, 8, 8, 8, 8, 8, 24, 8, 8, 8}>(Tier::scalar);

}  // namespace tandem
