// Rows of a table that were read before anybody needs them, and wait in memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "runtime/tables/row_files.h"

namespace tandem {

// Rows that are read ahead together.
class RowGroup {
 public:
  RowGroup(std::vector<int64_t> numbers, int64_t row_bytes);  // numbers: ascending, each once

  int64_t count() const { return int64_t(numbers_.size()); }
  int64_t nbytes() const { return count() * row_bytes_; }
  bool used_up() const { return unused_ <= 0; }
  bool dropped() const { return dropped_; }
  void drop() { dropped_ = true; }

  // Reads row i of the group, unless somebody has read it, or did not want to wait for it. Rows that cannot be read are
  // left: whoever needs one learns why. Whether it was read.
  bool read(const RowFiles& files, int64_t i);

  // Copies a row that is there. False: it is none of them, or not there yet; then the group does not read it any more.
  bool take(int64_t number, uint8_t* to);

 private:
  enum State : uint8_t { kWaits, kBegun, kThere, kUsed };

  const std::vector<int64_t> numbers_;
  const int64_t row_bytes_;
  std::unique_ptr<uint8_t[]> rows_;
  std::unique_ptr<std::atomic<uint8_t>[]> states_;
  std::atomic<int64_t> unused_;
  std::atomic<bool> dropped_{false};
};

// The newest groups: what nobody came for goes first.
class RowsAhead {
 public:
  using Groups = std::deque<std::shared_ptr<RowGroup>>;

  explicit RowsAhead(int64_t most_bytes) : most_bytes_(most_bytes) {}

  // A new group of these rows, to be read; null where they are too many.
  std::shared_ptr<RowGroup> add(std::vector<int64_t> numbers, int64_t row_bytes);
  Groups groups() const;
  // Lets go of groups of which every row was taken.
  void tidy();

 private:
  const int64_t most_bytes_;
  mutable std::mutex mutex_;
  Groups groups_;
  int64_t bytes_ = 0;
};

}  // namespace tandem
