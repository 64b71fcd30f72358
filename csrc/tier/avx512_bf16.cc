#include "isa/avx512_bf16.h"
#include "abi/tiers.h"
#include "micro/table.h"

namespace tandem {

constexpr KernelTable kAvx512Bf16Table =
    make_table<Avx512Bf16Isa>(Tier::avx512_bf16, {kNever, kNever, 64, kNever, kNever, kNever, kNever, kNever});

}  // namespace tandem
