#include "abi/tiers.h"
#include "isa/int8_scalar.h"
#include "micro/int8_rows.h"

namespace tandem {

constexpr KernelTable kScalarIntegers = int8_activations<ScalarInts>(Tier::scalar);

}  // namespace tandem
