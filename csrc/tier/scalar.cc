#include "isa/scalar.h"
#include "abi/tiers.h"
#include "micro/table.h"

namespace tandem {

constexpr KernelTable kScalarTable = make_table<ScalarIsa>(Tier::scalar, {8, 8, 8, 8, 8, 8, 8, 8});

}  // namespace tandem
