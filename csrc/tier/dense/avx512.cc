#include "isa/avx512.h"
#include "tier/dense_table.h"

TANDEM_DENSE_TABLE(kAvx512Dense, Tier::avx512, Avx512Isa)
