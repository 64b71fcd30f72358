#include "abi/tiers.h"
#include "isa/avx2.h"
#include "micro/table.h"

namespace tandem {

constexpr KernelTable kAvx2Vectors = vectors<Avx2Isa, TileFromRows{64, 6, 8, 8, 5, 5, 8, 8, 24, 8, 8, 8}>(Tier::avx2);

}  // namespace tandem
