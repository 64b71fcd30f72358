#include "isa/scalar.h"
#include "abi/tiers.h"
#include "isa/int8_scalar.h"
#include "micro/int8_rows.h"
#include "micro/table.h"

namespace tandem {

constexpr KernelTable kScalarTable =
    with_int8<ScalarInts>(make_table<ScalarIsa>(Tier::scalar, {8, 8, 8, 8, 8, 8, 8, 8, 24}));

}  // namespace tandem
