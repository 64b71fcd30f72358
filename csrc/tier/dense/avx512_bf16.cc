#include "isa/avx512_bf16.h"
#include "tier/dense_table.h"

TANDEM_DENSE_TABLE(kAvx512Bf16Dense, Tier::avx512_bf16, Avx512Bf16Isa)
