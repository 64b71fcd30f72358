#include "abi/tiers.h"
#include "isa/int8_avx512.h"
#include "micro/int8_rows.h"

namespace tandem {

constexpr KernelTable kAvx512Integers = int8_activations<Avx512Ints>(Tier::avx512);

}  // namespace tandem
