// Numbers of a table's rows that n-grams of tokens name.
#pragma once

#include <cstdint>
#include <vector>

namespace tandem {

// What a sequence's last tokens were lies in a ring here, by its slot. Steps come in order.
class RowNumbers {
 public:
  struct Hashes {
    int64_t longest, heads, stop;      // tokens of the longest n-gram; hashes of each length; what stands for no token
    std::vector<int64_t> multipliers;  // [longest]
    std::vector<int64_t> sizes, offsets;  // [(longest - 1) * heads]
  };

  static constexpr int64_t kPlaces = 256;  // of a slot: rows of draft tokens have places of their own

  // Throws std::invalid_argument.
  explicit RowNumbers(Hashes hashes);

  int64_t hashes() const { return int64_t(hashes_.sizes.size()); }
  const Hashes& shape() const { return hashes_; }

  // Row t is of the sequence in `slot`, at `position`; rows of a slot come in the order of their positions. Writes
  // [hashes] to `out`.
  void row(int64_t token, int64_t position, int64_t slot, int64_t* out);

  // Numbers of tokens [longest - 1, count) of one text, whose n-grams begin at its first. Writes [., hashes] to `out`.
  void text(const int64_t* tokens, int64_t count, int64_t* out) const;

  // A slot becomes another's copy.
  void copy(int64_t source, int64_t target);

 private:
  int64_t* ring(int64_t slot);
  // last: newest first.
  void hash(const int64_t* last, int64_t* out) const;

  const Hashes hashes_;
  std::vector<int64_t> rings_;  // [slots, kPlaces]
};

}  // namespace tandem
