#include "isa/avx512.h"
#include "abi/tiers.h"
#include "micro/table.h"

namespace tandem {

constexpr KernelTable kAvx512Table =
    make_table<Avx512Isa>(Tier::avx512, {kNever, kNever, kNever, kNever, 32, kNever, kNever, kNever});

}  // namespace tandem
