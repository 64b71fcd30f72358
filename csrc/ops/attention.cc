// Paged causal attention. Work is cut along (sequence, kv head, block of query rows), and along the keys where that
// leaves workers idle. Every row sees the same key blocks in the same order, whatever the cut:
//
//   keys     |<------ split 0: kSplitKeys ------>|<------ split 1 ------>| ...     partial results, merged in order
//   block    |kBlockKeys|kBlockKeys|  ...        |                                 online softmax inside a split
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "ops/dense.h"

namespace tandem {
namespace {

constexpr int64_t kBlockKeys = 64;   // K and V of a block as f32: 32 KiB at head_dim 64
constexpr int64_t kSplitKeys = 512;  // part of a row's arithmetic: changing it changes last bits
constexpr int64_t kTokensPerTask = 16;

struct Task {
  int32_t sequence, kv_head, first_token, tokens;  // tokens: rows of the batch
  int64_t first_split, splits, partial;            // partial: index of the first partial result
};

// One query head of one token: f32 query, state and sum.
struct RowSums {
  RowSums(int64_t count, int64_t padded_) : padded(padded_), states(count), acc(count * padded_) { clear(); }
  void clear() {
    std::fill(states.begin(), states.end(), AttentionState{-std::numeric_limits<float>::infinity(), 0.0f});
    std::fill(acc.begin(), acc.end(), 0.0f);
  }
  int64_t padded;
  std::vector<AttentionState> states;
  std::vector<float> acc;
};

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
    const int64_t partials = plan(pool.size());
    if (partials == 0) {
      pool.for_each(tasks_.size(), [&](int64_t i, const Worker&) { whole(tasks_[i]); });
      return;
    }
    std::vector<RowSums> sums;
    std::vector<std::pair<int64_t, int64_t>> pieces;  // (task, split)
    for (size_t t = 0; t < tasks_.size(); ++t)
      for (int64_t s = 0; s < tasks_[t].splits; ++s) {
        pieces.emplace_back(t, s);
        sums.emplace_back(tasks_[t].tokens * group_, padded_);
      }
    pool.for_each(pieces.size(), [&](int64_t i, const Worker&) {
      const auto [t, s] = pieces[i];
      add_split(tasks_[t], tasks_[t].first_split + s, sums[i]);
    });
    for (const Task& task : tasks_) {
      RowSums total(task.tokens * group_, padded_);
      for (int64_t s = 0; s < task.splits; ++s) merge(total, sums[task.partial + s]);
      finish(task, total);
    }
  }

 private:
  // Key positions that token row t of sequence s sees: [first, last].
  int64_t last_key(const Task& task, int64_t token) const {
    const int64_t row_in_sequence = task.first_token + token - batch_.query_starts[task.sequence];
    const int64_t queries = batch_.query_starts[task.sequence + 1] - batch_.query_starts[task.sequence];
    return batch_.seq_lens[task.sequence] - queries + row_in_sequence;
  }
  int64_t first_key(int64_t last) const { return a_.window > 0 ? std::max<int64_t>(0, last + 1 - a_.window) : 0; }

  // Fills tasks_; returns the number of partial results, 0 where whole tasks keep every worker busy.
  int64_t plan(int workers) {
    int64_t partials = 0, longest = 0;
    for (int32_t s = 0; s < batch_.sequences(); ++s)
      for (int32_t first = batch_.query_starts[s]; first < batch_.query_starts[s + 1]; first += kTokensPerTask)
        for (int32_t g = 0; g < h_.kv_heads; ++g) {
          Task task{s, g, first, 0, 0, 0, partials};
          task.tokens = std::min<int32_t>(kTokensPerTask, batch_.query_starts[s + 1] - first);
          task.first_split = first_key(last_key(task, 0)) / kSplitKeys;
          task.splits = last_key(task, task.tokens - 1) / kSplitKeys + 1 - task.first_split;
          partials += task.splits;
          longest = std::max(longest, task.splits);
          tasks_.push_back(task);
        }
    const bool enough = static_cast<int64_t>(tasks_.size()) >= 4 * workers;
    return workers == 1 || longest <= 1 || enough ? 0 : partials;
  }

  void whole(const Task& task) const {
    RowSums total(task.tokens * group_, padded_), part(task.tokens * group_, padded_);
    for (int64_t s = 0; s < task.splits; ++s) {
      if (s > 0) part.clear();
      add_split(task, task.first_split + s, part);
      merge(total, part);
    }
    finish(task, total);
  }

  void merge(RowSums& into, const RowSums& from) const {
    for (size_t r = 0; r < into.states.size(); ++r)
      kernels_.merge(&into.states[r], &into.acc[r * padded_], &from.states[r], &from.acc[r * padded_], padded_);
  }

  void add_split(const Task& task, int64_t split, RowSums& sums) const {
    thread_local std::vector<float> scratch;  // q rows, K block, V block, scores; grows to the largest call
    const int64_t rows = task.tokens * group_;
    scratch.resize((rows + 2 * kBlockKeys) * padded_ + kBlockKeys);
    float *q = scratch.data(), *k = q + rows * padded_, *v = k + kBlockKeys * padded_,
          *scores = v + kBlockKeys * padded_;
    load_queries(task, q);
    const int64_t end = std::min((split + 1) * kSplitKeys, last_key(task, task.tokens - 1) + 1);
    const int64_t oldest = first_key(last_key(task, 0)) / kBlockKeys * kBlockKeys;
    for (int64_t block = std::max(split * kSplitKeys, oldest); block < end; block += kBlockKeys) {
      const int64_t keys = std::min(kBlockKeys, end - block);
      load_keys(task, block, keys, k, v);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t last = last_key(task, r / group_);
        const int64_t from = std::max<int64_t>(0, first_key(last) - block), to = std::min(keys, last + 1 - block);
        kernels_.attend(q + r * padded_, k, v, from, to, padded_, scores, &sums.states[r], &sums.acc[r * padded_]);
      }
    }
  }

  // Scaled queries of the task's tokens, [token][head of the group][padded].
  void load_queries(const Task& task, float* q) const {
    const int64_t head = h_.head_dim * size_;
    for (int64_t t = 0; t < task.tokens; ++t, q += group_ * padded_) {
      const int64_t first = (task.first_token + t) * h_.heads + task.kv_head * group_;
      kernels_.widen(static_cast<const char*>(a_.q) + first * head, head, group_, a_.scale, q, h_.head_dim, padded_,
                     a_.type);
    }
  }

  void load_keys(const Task& task, int64_t first, int64_t keys, float* k, float* v) const {
    const int32_t* table = &batch_.block_tables[task.sequence * batch_.table_width()];
    const int64_t head = h_.head_dim * size_, stride = h_.kv_heads * head;
    for (int64_t j = 0; j < keys;) {  // page by page
      const int64_t position = first + j, row = position % batch_.page_size;
      const int64_t run = std::min(keys - j, batch_.page_size - row);
      const int64_t offset =
          (table[position / batch_.page_size] * batch_.page_size + row) * stride + task.kv_head * head;
      const char *from_k = static_cast<const char*>(a_.k_pages) + offset,
                 *from_v = static_cast<const char*>(a_.v_pages) + offset;
      kernels_.widen(from_k, stride, run, 1.0f, k + j * padded_, h_.head_dim, padded_, a_.type);
      kernels_.widen(from_v, stride, run, 1.0f, v + j * padded_, h_.head_dim, padded_, a_.type);
      j += run;
    }
  }

  void finish(const Task& task, const RowSums& total) const {
    const int64_t head = h_.head_dim * size_;
    for (int64_t r = 0; r < task.tokens * group_; ++r) {
      const int64_t index = (task.first_token + r / group_) * h_.heads + task.kv_head * group_ + r % group_;
      kernels_.narrow(&total.acc[r * padded_], 1.0f / total.states[r].sum, static_cast<char*>(a_.out) + index * head,
                      h_.head_dim, a_.type);
    }
  }

  const DenseKernels& kernels_;
  const BatchView& batch_;
  const DenseOps::Heads& h_;
  const DenseOps::Attention& a_;
  const int64_t group_, size_, padded_;
  std::vector<Task> tasks_;
};

}  // namespace

void DenseOps::attention(const BatchView& batch, const Heads& heads, const Attention& args) const {
  AttentionCall(*this, batch, heads, args).run(pool);
}

}  // namespace tandem
