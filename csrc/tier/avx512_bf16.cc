#include "isa/avx512_bf16.h"
#include "abi/tiers.h"
#include "isa/int8_vnni.h"
#include "micro/int8_rows.h"
#include "micro/table.h"

namespace tandem {

constexpr KernelTable kAvx512Bf16Table = with_int8<VnniInts>(
    make_table<Avx512Bf16Isa>(Tier::avx512_bf16, {kNever, kNever, 64, kNever, kNever, kNever, kNever, kNever}));

}  // namespace tandem
