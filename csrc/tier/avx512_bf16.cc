#include "isa/avx512_bf16.h"
#include "abi/tiers.h"
#include "isa/int8_vnni.h"
#include "micro/digit_rows.h"
#include "micro/int8_rows.h"
#include "micro/table.h"

namespace tandem {

// Digits are AMX's: here a row has the same bits in every batch, and they are only listed for tests.
constexpr KernelTable kAvx512Bf16Table = with_digits<VnniInts>(
    with_int8<VnniInts>(make_table<Avx512Bf16Isa>(Tier::avx512_bf16, {kNever, kNever, 64, 64, 64, 64, 64, 64, 24})));

}  // namespace tandem
