// Not a tier for users: AMX's blocking on portable code, for tests.
#include "abi/tiers.h"
#include "isa/int8_scalar.h"
#include "isa/scalar_bf16.h"
#include "isa/tiles_portable.h"
#include "micro/digit_rows.h"
#include "micro/int8_rows.h"
#include "micro/table.h"
#include "micro/tile_amx.h"

namespace tandem {

constexpr KernelTable kAmxStandinTable = with_digits<ScalarInts>(
    with_int8<ScalarInts>(
        make_amx_table<ScalarBf16Isa, PortableTiles>(
            Tier::amx_standin, make_table<ScalarBf16Isa>(Tier::amx_standin, {8, 2, 4, 4, 2, 3, 4, 4, 2})),
        kInt8BelowTiles),
    kDigitsBelowTiles, kDigitsBelowTilesOfGroups);

}  // namespace tandem
