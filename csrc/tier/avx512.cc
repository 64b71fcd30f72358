#include "isa/avx512.h"
#include "abi/tiers.h"
#include "isa/int8_avx512.h"
#include "micro/int8_rows.h"
#include "micro/table.h"

namespace tandem {

constexpr KernelTable kAvx512Table =
    with_int8<Avx512Ints>(make_table<Avx512Isa>(Tier::avx512, {kNever, kNever, kNever, 64, 32, 64, 64, 64, 24}));

}  // namespace tandem
