#include "abi/tiers.h"
#include "isa/int8_avx2.h"
#include "micro/int8_rows.h"

namespace tandem {

constexpr KernelTable kAvx2Integers = int8_activations<Avx2Ints>(Tier::avx2);

}  // namespace tandem
