#include "isa/avx2.h"
#include "abi/tiers.h"
#include "isa/int8_avx2.h"
#include "micro/int8_rows.h"
#include "micro/table.h"

namespace tandem {

constexpr KernelTable kAvx2Table = with_int8<Avx2Ints>(make_table<Avx2Isa>(Tier::avx2, {64, 6, 8, 8, 5, 5, 8, 8, 24}));

}  // namespace tandem
