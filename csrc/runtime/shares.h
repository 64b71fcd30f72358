// How things in a row are divided among workers for whom it matters which are theirs: what they fetch early must be
// what they compute later.
#pragma once

#include <cstdint>

namespace tandem {

// Worker k of `workers` has units [first_of_share(k), first_of_share(k + 1)). `turn` says to whom what is left over
// goes: who has one more of this row should not have one more of every row.
inline int64_t first_of_share(int64_t units, int64_t workers, int64_t turn, int64_t k) {
  return (units * k + turn % workers) / workers;
}

}  // namespace tandem
