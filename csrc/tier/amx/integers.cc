#include "abi/tiers.h"
#include "isa/int8_vnni.h"
#include "micro/digit_rows.h"
#include "micro/int8_rows.h"

namespace tandem {
namespace {

struct TileInts : VnniInts {
  static constexpr bool kAsksAhead = true;  // as its other kernels of few rows: nothing else was timed there
};

}  // namespace

constexpr KernelTable kAmxIntegers = with_digits<VnniInts>(int8_activations<TileInts>(Tier::amx, kInt8BelowTiles),
                                                           kDigitsBelowTiles, kDigitsBelowTilesOfGroups);

}  // namespace tandem
