#include "runtime/ranks/shm_lane.h"

#include <fcntl.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "runtime/signal.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kHeaderBytes = kMostRanks * kLaneLine;
constexpr int kPollsPerClock = 64;  // ~2 us
// A wait spins, then lets others run, then naps: ranks may be apart by a prompt's milliseconds.
constexpr double kSpin = 50e-6, kYield = 2e-3;
constexpr timespec kNap{0, 50'000};
constexpr double kLookEvery = 0.1;  // seconds from one look at another rank's process to the next
// A longer time between two looks is one in which this process itself did not run: nobody has waited.
constexpr double kMostWaited = 1.0;

constexpr int64_t kBlock = 256;  // numbers whose sums stay in the first cache

float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

float load(float number) { return number; }
float load(uint16_t number) { return float_of(uint32_t(number) << 16); }

void store(float value, float* to) { *to = value; }

// To the nearest, of two the even one, as torch does.
void store(float value, uint16_t* to) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  *to = uint16_t((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
}

// Past the last number comes 2: a 1 would be of the same half as the call before.
uint32_t next_call(uint32_t call) { return call == 0xFFFFFFFF ? 2 : call + 1; }

// The first word of a cache line: the number of a message; of a rank's own line 1 once it has come, and holds its lock.
std::atomic_ref<uint32_t> word(uint8_t* line) { return std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(line)); }

// How long a rank has been waited for, as far as this process ran.
class Waited {
 public:
  double seconds() {
    const auto now = Clock::now();
    waited_ += std::min(std::chrono::duration<double>(now - last_).count(), kMostWaited);
    last_ = now;
    return waited_;
  }

 private:
  Clock::time_point last_ = Clock::now();
  double waited_ = 0;
};

std::string in_seconds(double seconds) {
  std::string text = std::to_string(seconds);
  return text.substr(0, text.find('.') + 2);
}

}  // namespace

int64_t shared_bytes(const LaneShape& shape) {
  return kHeaderBytes + 2 * shape.ranks * shape.ranks * (kLaneLine + shape.bytes);
}

ShmLane::ShmLane(uint8_t* memory, const LaneShape& shape, const LanePatience& patience, int file, uint32_t call)
    : memory_(memory), shape_(shape), patience_(patience), file_(file), call_(call) {
  if (file_ >= 0) word(memory_ + shape_.rank * kLaneLine).store(1, std::memory_order_release);
}

// Where `to` receives what `from` sends in this call.
uint8_t* ShmLane::memory_of(int to, int from) const {
  const int64_t message = (int64_t(to) * 2 + (call_ & 1)) * shape_.ranks + from;
  return memory_ + kHeaderBytes + message * (kLaneLine + shape_.bytes);
}

// To all others, of whom each begins elsewhere.
void ShmLane::send(const uint8_t* data, int64_t bytes) const {
  // What was read of the call before last was read before this is written.
  std::atomic_thread_fence(std::memory_order_acq_rel);
  for (int next = 1; next < shape_.ranks; ++next) {
    uint8_t* to = memory_of((shape_.rank + next) % shape_.ranks, shape_.rank);
    if (bytes > 0) std::memcpy(to + kLaneLine, data, size_t(bytes));
    word(to).store(call_, std::memory_order_release);
  }
}

const uint8_t* ShmLane::received(int from) const {
  uint8_t* message = memory_of(shape_.rank, from);
  const auto has_come = [&] { return word(message).load(std::memory_order_acquire) == call_; };
  Waited waited;
  for (double look = kLookEvery;;) {
    for (int i = 0; i < (patience_.yields ? 1 : kPollsPerClock); ++i) {
      if (has_come()) return message + kLaneLine;
      cpu_pause();
    }
    const double seconds = waited.seconds();
    if (seconds >= look) {
      // What it sent before it ended counts.
      if (has_ended(from) && !has_come()) throw RankMissing("rank " + std::to_string(from) + " has ended");
      if (seconds >= patience_.seconds)
        throw RankMissing("rank " + std::to_string(from) + " has not answered for " + in_seconds(seconds) + " seconds");
      look = std::min(seconds + kLookEvery, patience_.seconds);
    }
    if (seconds > kYield) {
      nanosleep(&kNap, nullptr);
    } else if (patience_.yields || seconds > kSpin) {
      sched_yield();
    }
  }
}

// It had come, and the system has taken its lock away.
bool ShmLane::has_ended(int rank) const {
  if (file_ < 0 || !word(memory_ + rank * kLaneLine).load(std::memory_order_acquire)) return false;
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return fcntl(file_, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

template <class Number>
void ShmLane::sum_piece(uint8_t* rows, int64_t count) {
  call_ = next_call(call_);
  send(rows, count * int64_t(sizeof(Number)));
  const uint8_t* of_rank[kMostRanks];
  for (int rank = 0; rank < shape_.ranks; ++rank) of_rank[rank] = rank == shape_.rank ? rows : received(rank);
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t held = std::min(kBlock, count - first);
    float total[kBlock];
    for (int rank = 0; rank < shape_.ranks; ++rank) {
      const auto* numbers = reinterpret_cast<const Number*>(of_rank[rank]) + first;
      if (rank == 0)
        for (int64_t i = 0; i < held; ++i) total[i] = load(numbers[i]);
      else
        for (int64_t i = 0; i < held; ++i) total[i] += load(numbers[i]);
    }
    auto* sums = reinterpret_cast<Number*>(rows) + first;
    for (int64_t i = 0; i < held; ++i) store(total[i], sums + i);
  }
}

void ShmLane::sum(void* rows, int64_t count, DType type) {
  auto* bytes = static_cast<uint8_t*>(rows);
  const int64_t size = type == DType::bf16 ? 2 : 4, most = shape_.bytes / size;
  for (int64_t begin = 0; begin < count; begin += most) {
    const int64_t piece = std::min(most, count - begin);
    type == DType::bf16 ? sum_piece<uint16_t>(bytes + begin * size, piece)
                        : sum_piece<float>(bytes + begin * size, piece);
  }
}

// Of every rank its bytes from `first` on. One that has none left sends a number all the same.
void ShmLane::gather_piece(const uint8_t* own, uint8_t* row, int64_t first, int64_t each, int64_t whole) {
  call_ = next_call(call_);
  const auto left = [&](int64_t rank) {
    const int64_t has = std::clamp<int64_t>(whole - rank * each, 0, each);
    return std::clamp<int64_t>(has - first, 0, shape_.bytes);
  };
  send(own + first, left(shape_.rank));
  for (int rank = 0; rank < shape_.ranks; ++rank) {
    const uint8_t* from = rank == shape_.rank ? own + first : received(rank);
    if (left(rank) > 0) std::memcpy(row + rank * each + first, from, size_t(left(rank)));
  }
}

void ShmLane::gather(const uint8_t* own, uint8_t* row, int64_t each, int64_t whole) {
  for (int64_t first = 0; first < each; first += shape_.bytes) gather_piece(own, row, first, each, whole);
}

}  // namespace tandem
