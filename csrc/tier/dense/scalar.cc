#include "isa/scalar.h"
#include "tier/dense_table.h"

TANDEM_DENSE_TABLE(kScalarDense, Tier::scalar, ScalarIsa)
