#include "abi/tiers.h"
#include "isa/avx512_fp16.h"
#include "isa/tiles_amx.h"
#include "micro/tile_amx.h"

namespace tandem {

constexpr KernelTable kAmxSmallTiles = small_tiles<Avx512Fp16Isa, AmxTiles>(Tier::amx);

}  // namespace tandem
