// Scores are cut along rows and keys, in waves whose scores fit some memory; each row's choice is one task:
//
//   block of rows x chunk of keys -> scores [rows of the wave, keys]        then, row by row -> chosen
#include "ops/token_index.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>
#include <vector>

#include "ops/row_tasks.h"

namespace tandem {
namespace {

constexpr int64_t kChunkKeys = 512;                 // of a task: as floats they fit L2 at 128 channels
constexpr int64_t kRowsPerTask = 16;                // which share a chunk of keys
constexpr int64_t kWaveFloats = int64_t{16} << 20;  // scores kept at a time: 64 MiB
constexpr float kNever = -std::numeric_limits<float>::infinity();

int64_t lanes(int64_t n) { return (n + kRowLanes - 1) / kRowLanes * kRowLanes; }
int64_t bytes_of(DType type) { return type == DType::bf16 ? 2 : 4; }

// Memory of the calling thread: it grows to the largest call and is kept.
float* scratch(int slot, int64_t floats) {
  thread_local std::vector<float> memory[4];
  if (static_cast<int64_t>(memory[slot].size()) < floats) memory[slot].resize(floats);
  return memory[slot].data();
}
enum Slot { kRow, kQueries, kKeys, kScores };

class ChooseCall {
 public:
  ChooseCall(const DenseOps& dense, const BatchView& batch, const IndexShape& shape, const IndexCall& call)
      : dense_(dense), kernels_(dense.kernels), batch_(batch), s_(shape), c_(call), size_(bytes_of(call.type)) {}

  void run() {
    for (int64_t position : batch_.positions)
      if (s_.half > 0 && position >= c_.table_rows)
        throw std::invalid_argument("token index: a position lies beyond the rotary tables (context length)");
    if (c_.k) for_rows(dense_.pool, batch_.rows(), s_.dim * 4, [&](int64_t t) { store_key(t); });
    for (int64_t s = 0; s < batch_.sequences(); ++s)
      for (int32_t first = batch_.query_starts[s]; first < batch_.query_starts[s + 1]; first += kRowsPerTask)
        blocks_.push_back({s, first, std::min<int64_t>(kRowsPerTask, batch_.query_starts[s + 1] - first)});
    for (size_t first = 0; first < blocks_.size();) first = run_wave(first);
  }

 private:
  struct Block {
    int64_t sequence, first, rows;  // rows of the batch
  };
  struct Piece {
    size_t block;
    int64_t chunk;
  };
  struct Row {
    int64_t sequence, row;
    const float* scores;
  };

  // Of row t of sequence s: how many tokens it may look at, and keys.
  int64_t known(int64_t s, int64_t t) const { return batch_.seq_lens[s] - (batch_.query_starts[s + 1] - t) + 1; }
  int64_t keys_of(int64_t s, int64_t t) const { return known(s, t) / s_.pool; }
  int64_t most_keys() const { return s_.budget / s_.pool; }
  int64_t longest(const Block& b) const { return keys_of(b.sequence, b.first + b.rows - 1); }
  int64_t floats_of(const Block& b) const { return longest(b) > most_keys() ? b.rows * lanes(longest(b)) : 0; }

  // Where something lies that a page has `size` of, by its number in the sequence.
  int64_t row_of(int64_t s, int64_t number, int64_t size) const {
    return batch_.block_tables[s * batch_.table_width() + number / size] * size + number % size;
  }
  int64_t cache_row(int64_t s, int64_t position) const { return row_of(s, position, batch_.page_size); }

  size_t run_wave(size_t first) {
    int64_t floats = 0;
    size_t end = first;
    std::vector<int64_t> starts;
    for (; end < blocks_.size(); ++end) {
      const int64_t each = floats_of(blocks_[end]);
      if (end > first && floats + each > kWaveFloats) break;
      starts.push_back(floats);
      floats += each;
    }
    float* scores = scratch(kScores, floats);
    std::vector<Piece> pieces;
    std::vector<Row> rows;
    for (size_t b = first; b < end; ++b) {
      const Block& block = blocks_[b];
      const int64_t stride = lanes(longest(block));
      for (int64_t i = 0; i < block.rows; ++i)
        rows.push_back({block.sequence, block.first + i, scores + starts[b - first] + i * stride});
      for (int64_t c = 0; floats_of(block) && c * kChunkKeys < longest(block); ++c) pieces.push_back({b, c});
    }
    const auto score = [&](int64_t i, const Worker&) {
      const Piece& piece = pieces[size_t(i)];
      add_scores(blocks_[piece.block], piece.chunk * kChunkKeys, scores + starts[piece.block - first]);
    };
    const auto pick = [&](int64_t i, const Worker&) { choose(rows[size_t(i)]); };
    dense_.pool.run_phases({{int64_t(pieces.size()), score}, {int64_t(rows.size()), pick}});
    return end;
  }

  // Scores of keys first ... of a chunk, for all rows of a block that see them and have to choose.
  void add_scores(const Block& block, int64_t first, float* scores) const {
    const int64_t stride = lanes(s_.dim), end = std::min(first + kChunkKeys, longest(block));
    float* keys = scratch(kKeys, kChunkKeys * stride);
    load_keys(block.sequence, first, end - first, stride, keys);
    float* q = scratch(kQueries, lanes(s_.heads) * (s_.dim + 1));
    for (int64_t i = 0; i < block.rows; ++i) {
      const int64_t all = keys_of(block.sequence, block.first + i), seen = std::min(end, all) - first;
      if (all <= most_keys() || seen <= 0) continue;
      float* gates = q + lanes(s_.heads) * s_.dim;
      load_query(block.first + i, q, gates);
      kernels_.token_scores(q, gates, keys, lanes(s_.heads), s_.dim, stride, seen,
                            scores + i * lanes(longest(block)) + first);
    }
  }

  void load_keys(int64_t s, int64_t first, int64_t count, int64_t stride, float* to) const {
    const int64_t row = s_.dim * size_, page = batch_.page_size / s_.pool;
    for (int64_t j = 0; j < count;) {  // page by page
      const int64_t run = std::min(count - j, page - (first + j) % page);
      kernels_.widen(static_cast<const char*>(c_.pages) + row_of(s, first + j, page) * row, row, run, 1.0f,
                     to + j * stride, s_.dim, stride, c_.type);
      j += run;
    }
  }

  // Turned, [dim][heads]; heads and gates that only fill up are zeros.
  void load_query(int64_t t, float* q, float* gates) const {
    const int64_t heads = lanes(s_.heads), row = s_.dim * size_;
    std::fill_n(q, heads * s_.dim, 0.0f);
    std::fill_n(gates, heads, 0.0f);
    std::copy_n(c_.gates + t * s_.heads, s_.heads, gates);
    float* head = scratch(kRow, 3 * lanes(s_.dim));
    char* turned = reinterpret_cast<char*>(head + lanes(s_.dim));
    for (int64_t h = 0; h < s_.heads; ++h) {
      turn(static_cast<const char*>(c_.q) + (t * s_.heads + h) * row, t, turned);
      kernels_.widen(turned, row, 1, 1.0f, head, s_.dim, lanes(s_.dim), c_.type);
      for (int64_t i = 0; i < s_.dim; ++i) q[i * heads + h] = head[i];
    }
  }

  void store_key(int64_t t) const {
    float* x = scratch(kQueries, lanes(s_.dim));
    kernels_.widen(static_cast<const char*>(c_.k) + t * s_.dim * size_, s_.dim * size_, 1, 1.0f, x, s_.dim,
                   lanes(s_.dim), c_.type);
    float mean = 0.0f, squares = 0.0f;
    for (int64_t i = 0; i < s_.dim; ++i) mean += x[i] / static_cast<float>(s_.dim);
    for (int64_t i = 0; i < s_.dim; ++i) squares += (x[i] - mean) * (x[i] - mean);
    const float factor = 1.0f / std::sqrt(squares / static_cast<float>(s_.dim) + c_.eps);
    for (int64_t i = 0; i < s_.dim; ++i) x[i] = (x[i] - mean) * factor * c_.norm[i] + c_.bias[i];
    char* row = reinterpret_cast<char*>(scratch(kKeys, lanes(s_.dim)));
    kernels_.narrow(x, 1.0f, row, s_.dim, c_.type);
    turn(row, t, static_cast<char*>(c_.pages) + batch_.cache_slots[t] * s_.dim * size_);
  }

  // One head by the position of row t; pairs of neighbours become halves, of queries and keys alike.
  void turn(const char* head, int64_t t, char* to) const {
    const int64_t angle = batch_.positions[t] * s_.half;
    char* halves = reinterpret_cast<char*>(scratch(kRow, 3 * lanes(s_.dim)) + 2 * lanes(s_.dim));
    if (s_.neighbours) {
      for (int64_t i = 0; i < s_.half; ++i) {
        std::memcpy(halves + i * size_, head + 2 * i * size_, size_t(size_));
        std::memcpy(halves + (s_.half + i) * size_, head + (2 * i + 1) * size_, size_t(size_));
      }
      std::memcpy(halves + 2 * s_.half * size_, head + 2 * s_.half * size_, size_t((s_.dim - 2 * s_.half) * size_));
      head = halves;
    }
    kernels_.rotate_head(head, nullptr, 0.0f, c_.cos + angle, c_.sin + angle, s_.half, to, s_.dim, c_.type, c_.type);
  }

  void choose(const Row& row) const {
    const int64_t seen = known(row.sequence, row.row), count = keys_of(row.sequence, row.row);
    const int64_t kept = std::min(count, most_keys()), behind = seen - count * s_.pool;
    int32_t* out = c_.chosen + row.row * s_.width();
    c_.counts[row.row] = int32_t(kept * s_.pool + behind);
    std::fill(out + c_.counts[row.row], out + s_.width(), 0);
    const auto take = [&](int64_t first, int64_t tokens) {
      for (int64_t i = first; i < first + tokens; ++i) *out++ = int32_t(cache_row(row.sequence, i));
    };
    if (kept == count) return take(0, seen);
    float* ranked = scratch(kKeys, count);
    std::transform(row.scores, row.scores + count, ranked, [](float x) { return x == x ? x : kNever; });
    std::nth_element(ranked, ranked + kept - 1, ranked + count, std::greater<>());
    const float least = ranked[kept - 1];
    int64_t equal = kept - std::count_if(ranked, ranked + kept, [&](float x) { return x > least; });
    for (int64_t j = 0; j < count; ++j) {
      const float x = row.scores[j] == row.scores[j] ? row.scores[j] : kNever;
      if (x > least || (x == least && equal-- > 0)) take(j * s_.pool, s_.pool);
    }
    take(count * s_.pool, behind);
  }

  const DenseOps& dense_;
  const DenseKernels& kernels_;
  const BatchView& batch_;
  const IndexShape& s_;
  const IndexCall& c_;
  const int64_t size_;
  std::vector<Block> blocks_;
};

// The batch over pages of one token. A sequence whose rows all see what is before them stays as it is. Every row of
// another becomes a sequence of its own: of the tokens that it chose.
BatchView chosen_view(const BatchView& batch, const int32_t* chosen, const int32_t* counts, int64_t width) {
  std::vector<int32_t> starts{0}, lens, tables;
  const auto add = [&](int64_t rows, int64_t length, const auto& row_of) {
    starts.push_back(int32_t(starts.back() + rows));
    lens.push_back(int32_t(length));
    for (int64_t j = 0; j < width; ++j) tables.push_back(j < length ? int32_t(row_of(j)) : 0);
  };
  for (int64_t s = 0; s < batch.sequences(); ++s) {
    const int64_t first = batch.query_starts[s], end = batch.query_starts[s + 1], length = batch.seq_lens[s];
    const int32_t* table = &batch.block_tables[s * batch.table_width()];
    bool all = end > first;
    for (int64_t t = first; t < end; ++t) all = all && counts[t] == length - (end - t) + 1;
    if (all)
      add(end - first, length,
          [&](int64_t j) { return table[j / batch.page_size] * batch.page_size + j % batch.page_size; });
    for (int64_t t = first; !all && t < end; ++t) add(1, counts[t], [&](int64_t j) { return chosen[t * width + j]; });
  }
  return BatchView(batch.positions, batch.cache_slots, std::move(starts), std::move(lens), std::move(tables), {}, 1,
                   batch.num_pages * batch.page_size);
}

}  // namespace

void choose_tokens(const DenseOps& dense, const BatchView& batch, const IndexShape& shape, const IndexCall& call) {
  ChooseCall(dense, batch, shape, call).run();
}

void attend_chosen(const DenseOps& dense, const BatchView& batch, const DenseOps::Heads& heads,
                   const DenseOps::Attention& args, const int32_t* chosen, const int32_t* counts, int64_t width) {
  dense.attention(chosen_view(batch, chosen, counts, width), heads, args);
}

}  // namespace tandem
