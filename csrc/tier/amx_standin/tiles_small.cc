#include "abi/tiers.h"
#include "isa/scalar_bf16.h"
#include "isa/tiles_portable.h"
#include "micro/tile_amx.h"

namespace tandem {

constexpr KernelTable kAmxStandinSmallTiles = small_tiles<ScalarBf16Isa, PortableTiles>(Tier::amx_standin);

}  // namespace tandem
