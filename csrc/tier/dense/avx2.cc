#include "isa/avx2.h"
#include "tier/dense_table.h"

TANDEM_DENSE_TABLE(kAvx2Dense, Tier::avx2, Avx2Isa)
