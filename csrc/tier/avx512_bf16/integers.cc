#include "abi/tiers.h"
#include "isa/int8_vnni.h"
#include "micro/digit_rows.h"
#include "micro/int8_rows.h"

namespace tandem {

// Digits are AMX's: here a row has the same bits in every batch, and they are only listed for tests.
constexpr KernelTable kAvx512Bf16Integers = with_digits<VnniInts>(int8_activations<VnniInts>(Tier::avx512_bf16));

}  // namespace tandem
