// Sums between processes of one host, through memory that they share. What is added up has the same bits on all ranks.
//
//   a cache line for each rank, then what each receives in: [2 halves][from ranks] of a cache line, whose first word is
//   the number of a call, and the bytes of a message
//
// A message is written bytes first, and read number first. Who waits looks at the number alone: lines that are looked
// at while they are written go to and fro, and a sum took twice as long. Calls are numbered alike by all ranks. A rank
// writes to every other one at [half][itself], and waits for the numbers of all others. So nobody begins call n + 2
// before all have read call n, and two halves are enough. That holds only where every rank sends every other one a
// number in every call.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "abi/weight_view.h"

namespace tandem {

constexpr int kMostRanks = 64;
constexpr int64_t kLaneLine = 64;  // bytes of a cache line

// Becomes tandem.errors.RankLost in Python.
struct RankMissing : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct LaneShape {
  int rank, ranks;
  int64_t bytes;  // of a message that is sent at once; whole cache lines
};

int64_t shared_bytes(const LaneShape& shape);

struct LanePatience {
  double seconds;       // for another rank
  bool yields = false;  // more ranks than CPUs: whoever polls keeps another from running
};

// Not thread-safe.
class ShmLane {
 public:
  // memory: shared_bytes, zeroed when it was made, outlives this. file: a descriptor of the memory that this rank
  // opened itself. It locks the byte of the rank's number until the process ends. −1: nobody looks whether ranks have
  // ended. call: the number before the first one's.
  ShmLane(uint8_t* memory, const LaneShape& shape, const LanePatience& patience, int file, uint32_t call);

  // rows[count], over which the sum is written: added in float32 in the order of ranks, then rounded to `type`. This
  // and `gather` throw RankMissing where another rank has ended, or has sent nothing for too long. Then nothing here
  // is usable any more.
  void sum(void* rows, int64_t count, DType type);

  // own: this rank's bytes of a row, of which every rank has `each`, and the last ones what is left of `whole`.
  void gather(const uint8_t* own, uint8_t* row, int64_t each, int64_t whole);

 private:
  uint8_t* memory_of(int to, int from) const;
  void send(const uint8_t* data, int64_t bytes) const;
  const uint8_t* received(int from) const;
  bool has_ended(int rank) const;
  template <class Number>
  void sum_piece(uint8_t* rows, int64_t count);
  void gather_piece(const uint8_t* own, uint8_t* row, int64_t first, int64_t each, int64_t whole);

  uint8_t* memory_;
  LaneShape shape_;
  LanePatience patience_;
  int file_;
  uint32_t call_;
};

}  // namespace tandem
