// Paged causal attention. Work is cut along (sequence, kv head, block of query rows: tokens and heads that share the kv
// head), and along the keys where that leaves workers idle. Every row sees the same key blocks in the same order,
// whatever the cut:
//
//   keys     |<------ split 0: kSplitKeys ------>|<------ split 1 ------>| ...     partial results, merged in order
//   block    |kBlockKeys|kBlockKeys|  ...        |                                 online softmax inside a split
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "ops/dense.h"

namespace tandem {
namespace {

constexpr int64_t kBlockKeys = 64;   // K and V of a block as f32: 32 KiB at head_dim 64
constexpr int64_t kSplitKeys = 512;  // part of a row's arithmetic: changing it changes last bits
constexpr int64_t kTokensPerTask = 16;
constexpr int64_t kHeadsPerTask = 16;                  // latent attention has 128 heads over one kv head
constexpr int64_t kPartialFloats = int64_t{16} << 20;  // partial results kept at a time: 64 MiB

struct Task {
  int32_t sequence, kv_head, first_token, tokens;  // tokens: rows of the batch
  int32_t first_head, heads;                       // of those that share the kv head
  int64_t first_split, splits;
};

// State and sum of each row of a task, in memory of somebody else: count * (padded + 2) floats.
struct RowSums {
  void clear() {
    std::fill_n(states, count, AttentionState{-std::numeric_limits<float>::infinity(), 0.0f});
    std::fill_n(acc, count * padded, 0.0f);
  }
  int64_t count, padded;
  AttentionState* states;
  float* acc;
};
static_assert(sizeof(AttentionState) == 2 * sizeof(float));

// Memory of the calling thread: it grows to the largest call and is kept.
float* scratch(int slot, int64_t floats) {
  thread_local std::vector<float> memory[3];
  if (static_cast<int64_t>(memory[slot].size()) < floats) memory[slot].resize(floats);
  return memory[slot].data();
}
enum Slot { kBlocks, kSums, kPartials };

class AttentionCall {
 public:
  AttentionCall(const DenseOps& ops, const BatchView& batch, const DenseOps::Heads& heads,
                const DenseOps::Attention& args)
      : kernels_(ops.kernels),
        batch_(batch),
        h_(heads),
        a_(args),
        group_(heads.heads / heads.kv_heads),
        size_(args.type == DType::bf16 ? 2 : 4),
        padded_((heads.head_dim + kRowLanes - 1) / kRowLanes * kRowLanes) {}

  void run(WorkerPool& pool) {
    if (plan(pool.size()))
      pool.for_each(tasks_.size(), [&](int64_t i, const Worker&) { whole(tasks_[i]); });
    else
      for (size_t first = 0; first < tasks_.size();) first = run_wave(pool, first);
  }

 private:
  // Every split of as many tasks as kPartialFloats hold, then their merging. Returns the first task of the next wave.
  size_t run_wave(WorkerPool& pool, size_t first) {
    int64_t floats = 0;
    size_t end = first;
    pieces_.clear();
    starts_.clear();
    for (; end < tasks_.size(); ++end) {
      const int64_t each = floats_of(tasks_[end]), splits = tasks_[end].splits;
      if (end > first && floats + splits * each > kPartialFloats) break;
      starts_.push_back(floats);
      for (int64_t s = 0; s < splits; ++s, floats += each) pieces_.push_back({end, s, floats});
    }
    float* partials = scratch(kPartials, floats);
    const auto add = [&](int64_t i, const Worker&) {
      const Task& task = tasks_[pieces_[i].task];
      add_split(task, task.first_split + pieces_[i].split, empty_sums(task, partials + pieces_[i].start));
    };
    const auto join = [&](int64_t i, const Worker&) {
      const Task& task = tasks_[first + i];
      const RowSums total = empty_sums(task, scratch(kSums, floats_of(task)));
      for (int64_t s = 0; s < task.splits; ++s) merge(total, sums(task, partials + starts_[i] + s * floats_of(task)));
      finish(task, total);
    };
    pool.run_phases({{static_cast<int64_t>(pieces_.size()), add}, {static_cast<int64_t>(end - first), join}});
    return end;
  }

  int64_t floats_of(const Task& task) const { return rows_of(task) * (padded_ + 2); }
  int64_t rows_of(const Task& task) const { return int64_t{task.tokens} * task.heads; }
  RowSums sums(const Task& task, float* memory) const {
    const int64_t count = rows_of(task);
    return {count, padded_, reinterpret_cast<AttentionState*>(memory + count * padded_), memory};
  }
  RowSums empty_sums(const Task& task, float* memory) const {
    RowSums made = sums(task, memory);
    made.clear();
    return made;
  }

  // Key positions that token row t of sequence s sees: [first, last].
  int64_t last_key(const Task& task, int64_t token) const {
    const int64_t row_in_sequence = task.first_token + token - batch_.query_starts[task.sequence];
    const int64_t queries = batch_.query_starts[task.sequence + 1] - batch_.query_starts[task.sequence];
    return batch_.seq_lens[task.sequence] - queries + row_in_sequence;
  }
  int64_t first_key(int64_t last) const { return a_.window > 0 ? std::max<int64_t>(0, last + 1 - a_.window) : 0; }

  // Fills tasks_; true where whole tasks keep every worker busy.
  bool plan(int workers) {
    int64_t longest = 0;
    for (int32_t s = 0; s < batch_.sequences(); ++s)
      for (int32_t first = batch_.query_starts[s]; first < batch_.query_starts[s + 1]; first += kTokensPerTask)
        for (int32_t g = 0; g < h_.kv_heads; ++g)
          for (int32_t head = 0; head < group_; head += kHeadsPerTask) {
            Task task{s, g, first, 0, head, static_cast<int32_t>(std::min(kHeadsPerTask, group_ - head)), 0, 0};
            task.tokens = std::min<int32_t>(kTokensPerTask, batch_.query_starts[s + 1] - first);
            task.first_split = first_key(last_key(task, 0)) / kSplitKeys;
            task.splits = last_key(task, task.tokens - 1) / kSplitKeys + 1 - task.first_split;
            longest = std::max(longest, task.splits);
            tasks_.push_back(task);
          }
    return workers == 1 || longest <= 1 || static_cast<int64_t>(tasks_.size()) >= 4 * workers;
  }

  void whole(const Task& task) const {
    float* memory = scratch(kSums, 2 * floats_of(task));
    const RowSums total = empty_sums(task, memory);
    for (int64_t s = 0; s < task.splits; ++s) {
      const RowSums part = empty_sums(task, memory + floats_of(task));
      add_split(task, task.first_split + s, part);
      merge(total, part);
    }
    finish(task, total);
  }

  void merge(const RowSums& into, const RowSums& from) const {
    for (int64_t r = 0; r < into.count; ++r)
      kernels_.merge(&into.states[r], &into.acc[r * padded_], &from.states[r], &from.acc[r * padded_], padded_);
  }

  void add_split(const Task& task, int64_t split, const RowSums& sums) const {
    const int64_t rows = rows_of(task);
    float* q = scratch(kBlocks, (rows + 2 * kBlockKeys) * padded_ + kAttentionRows * kBlockKeys);
    float *k = q + rows * padded_, *scores = k + 2 * kBlockKeys * padded_;
    float* v = a_.v_pages ? k + kBlockKeys * padded_ : k;
    load_queries(task, q);
    const int64_t end = std::min((split + 1) * kSplitKeys, last_key(task, task.tokens - 1) + 1);
    const int64_t oldest = first_key(last_key(task, 0)) / kBlockKeys * kBlockKeys;
    for (int64_t block = std::max(split * kSplitKeys, oldest); block < end; block += kBlockKeys) {
      const int64_t keys = std::min(kBlockKeys, end - block);
      load_keys(task, block, keys, k, v);
      for (int64_t first = 0, next = 0; first < rows; first = next) {  // rows that see the same keys of the block
        const Span seen = keys_of(task, first, block, keys);
        while (next < rows && keys_of(task, next, block, keys) == seen) next += task.heads;
        kernels_.attend(q + first * padded_, k, v, next - first, seen.first, seen.second, padded_, scores,
                        &sums.states[first], &sums.acc[first * padded_]);
      }
    }
  }

  // Keys of a block that a row sees, counted from the block's first.
  using Span = std::pair<int64_t, int64_t>;
  Span keys_of(const Task& task, int64_t row, int64_t block, int64_t keys) const {
    const int64_t last = last_key(task, row / task.heads);
    return {std::max<int64_t>(0, first_key(last) - block), std::min(keys, last + 1 - block)};
  }

  // Scaled queries of the task's tokens, [token][head of the task][padded].
  void load_queries(const Task& task, float* q) const {
    const int64_t head = h_.head_dim * size_;
    for (int64_t t = 0; t < task.tokens; ++t, q += task.heads * padded_) {
      const int64_t first = query_row(task, t);
      kernels_.widen(static_cast<const char*>(a_.q) + first * head, head, task.heads, a_.scale, q, h_.head_dim, padded_,
                     a_.type);
    }
  }

  void load_keys(const Task& task, int64_t first, int64_t keys, float* k, float* v) const {
    const int32_t* table = &batch_.block_tables[task.sequence * batch_.table_width()];
    for (int64_t j = 0; j < keys;) {  // page by page
      const int64_t position = first + j, row = position % batch_.page_size;
      const int64_t run = std::min(keys - j, batch_.page_size - row);
      const int64_t at = (table[position / batch_.page_size] * batch_.page_size + row) * h_.kv_heads + task.kv_head;
      const auto load = [&](const void* pages, int64_t dim, float* to) {
        kernels_.widen(static_cast<const char*>(pages) + at * dim * size_, h_.kv_heads * dim * size_, run, 1.0f,
                       to + j * padded_, dim, padded_, a_.type);
      };
      load(a_.k_pages, h_.head_dim, k);
      if (v != k) load(a_.v_pages, h_.value_dim, v);
      j += run;
    }
  }

  // Of the task's first head and its token t: a row of q and of the result.
  int64_t query_row(const Task& task, int64_t t) const {
    return (task.first_token + t) * h_.heads + task.kv_head * group_ + task.first_head;
  }

  void finish(const Task& task, const RowSums& total) const {
    const int64_t head = h_.value_dim * size_;
    for (int64_t r = 0; r < rows_of(task); ++r) {
      const int64_t index = query_row(task, r / task.heads) + r % task.heads;
      kernels_.narrow(&total.acc[r * padded_], share_of(total.states[r], index % h_.heads),
                      static_cast<char*>(a_.out) + index * head, h_.value_dim, a_.type);
    }
  }

  // What a row's values are multiplied with in the end.
  float share_of(const AttentionState& state, int64_t head) const {
    if (!a_.sinks) return 1.0f / state.sum;
    const float sink = a_.sinks[head], highest = std::max(state.max, sink), shrink = std::exp(state.max - highest);
    return shrink / (state.sum * shrink + std::exp(sink - highest));
  }

  const DenseKernels& kernels_;
  const BatchView& batch_;
  const DenseOps::Heads& h_;
  const DenseOps::Attention& a_;
  const int64_t group_, size_, padded_;
  std::vector<Task> tasks_;
  struct Piece {
    size_t task;
    int64_t split, start;  // start: of its partial result
  };
  std::vector<Piece> pieces_;    // of a wave
  std::vector<int64_t> starts_;  // of the wave's tasks
};

}  // namespace

void DenseOps::attention(const BatchView& batch, const Heads& heads, const Attention& args) const {
  AttentionCall(*this, batch, heads, args).run(pool);
}

}  // namespace tandem
