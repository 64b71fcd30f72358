#include "runtime/tables/row_numbers.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace tandem {
namespace {

constexpr int64_t kLongest = 16;

// As Python's %: never negative.
int64_t modulo(uint64_t value, int64_t size) {
  const int64_t rest = int64_t(value) % size;
  return rest < 0 ? rest + size : rest;
}

}  // namespace

RowNumbers::RowNumbers(Hashes hashes) : hashes_(std::move(hashes)) {
  const Hashes& h = hashes_;
  if (h.longest < 2 || h.longest > kLongest || h.heads < 1 || int64_t(h.multipliers.size()) != h.longest ||
      int64_t(h.sizes.size()) != (h.longest - 1) * h.heads || h.offsets.size() != h.sizes.size())
    throw std::invalid_argument("row numbers: multipliers, sizes and offsets do not fit the n-grams");
  if (std::any_of(h.sizes.begin(), h.sizes.end(), [](int64_t size) { return size < 1; }))
    throw std::invalid_argument("row numbers: a hash has no rows");
}

int64_t* RowNumbers::ring(int64_t slot) {
  const size_t wanted = size_t((slot + 1) * kPlaces);
  if (rings_.size() < wanted) rings_.resize(wanted, hashes_.stop);
  return &rings_[size_t(slot * kPlaces)];
}

void RowNumbers::row(int64_t token, int64_t position, int64_t slot, int64_t* out) {
  int64_t* own = ring(slot);
  own[position % kPlaces] = token;
  int64_t last[kLongest];
  for (int64_t back = 0; back < hashes_.longest; ++back)
    last[back] = position < back ? hashes_.stop : own[(position - back) % kPlaces];
  hash(last, out);
}

void RowNumbers::text(const int64_t* tokens, int64_t count, int64_t* out) const {
  int64_t last[kLongest];
  for (int64_t t = hashes_.longest - 1; t < count; ++t, out += hashes()) {
    for (int64_t back = 0; back < hashes_.longest; ++back) last[back] = tokens[t - back];
    hash(last, out);
  }
}

void RowNumbers::copy(int64_t source, int64_t target) {
  ring(std::max(source, target));
  std::copy_n(ring(source), kPlaces, ring(target));
}

void RowNumbers::hash(const int64_t* last, int64_t* out) const {
  // n-grams do not reach back over the token `stop`, which stands for what is missing, too.
  const Hashes& h = hashes_;
  uint64_t mixed = uint64_t(last[0]) * uint64_t(h.multipliers[0]);
  bool ended = false;
  for (int64_t back = 1, i = 0; back < h.longest; ++back) {
    ended = ended || last[back] == h.stop;
    mixed ^= uint64_t(ended ? h.stop : last[back]) * uint64_t(h.multipliers[size_t(back)]);
    for (int64_t head = 0; head < h.heads; ++head, ++i)
      out[i] = modulo(mixed, h.sizes[size_t(i)]) + h.offsets[size_t(i)];
  }
}

}  // namespace tandem
