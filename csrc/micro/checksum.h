// The part of XXH3 that takes time: its blocks (github.com/Cyan4973/xxHash doc/xxhash_spec.md, "XXH3 large inputs").
#pragma once

#include "abi/dense_kernels.h"
#include "isa/inline.h"

namespace tandem {
namespace {

// Multiplications of 32 bits side by side: at the speed of memory, where XXH64, whose are of 64 bits, is not.
template <class Isa>
void xxh3_blocks(uint64_t* sums, const uint8_t* data, int64_t blocks, const uint8_t* secret) {
  typename Isa::Sums lanes = Isa::load_sums(sums);
  for (int64_t b = 0; b < blocks; ++b, data += kXxh3BlockBytes) {
    for (int64_t i = 0; i < kXxh3Stripes; ++i)
      lanes = Isa::mix(lanes, data + i * kXxh3StripeBytes, secret + i * kXxh3SecretStep);
    lanes = Isa::scramble(lanes, secret + kXxh3SecretBytes - kXxh3StripeBytes);
  }
  Isa::store_sums(sums, lanes);
}

}  // namespace
}  // namespace tandem
