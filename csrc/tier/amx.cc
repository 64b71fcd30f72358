#include "abi/tiers.h"
#include "isa/avx512_fp16.h"
#include "isa/int8_vnni.h"
#include "isa/tiles_amx.h"
#include "micro/digit_rows.h"
#include "micro/int8_rows.h"
#include "micro/table.h"
#include "micro/tile_amx.h"

namespace tandem {

constexpr KernelTable kAmxTable = with_digits<VnniInts>(
    with_int8<VnniInts>(make_amx_table<Avx512Fp16Isa, AmxTiles>(
                            Tier::amx, make_table<Avx512Bf16Isa>(Tier::amx, {8, 2, 4, 4, 2, 3, 4, 4, 2})),
                        kInt8BelowTiles),
    kDigitsBelowTiles, kDigitsBelowTilesOfGroups);

}  // namespace tandem
