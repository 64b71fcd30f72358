#include "ops/dense.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "ops/row_tasks.h"

namespace tandem {
namespace {

constexpr int64_t bytes_of(DType type) { return type == DType::bf16 ? 2 : 4; }

void check(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

// One norm over all heads together (OLMoE), else 0 = "per head".
float whole_row_rms(const DenseKernels& kernels, const void* x, int64_t norm_size, const DenseOps::Heads& h,
                    const DenseOps::RopeStore& a) {
  return norm_size > h.head_dim ? kernels.inverse_rms(x, norm_size, a.eps, a.type) : 0.0f;
}

}  // namespace

BatchView::BatchView(std::vector<int64_t> positions_, std::vector<int64_t> cache_slots_,
                     std::vector<int32_t> query_starts_, std::vector<int32_t> seq_lens_,
                     std::vector<int32_t> block_tables_, std::vector<int32_t> slots_, int64_t page_size_,
                     int64_t num_pages_)
    : positions(std::move(positions_)),
      cache_slots(std::move(cache_slots_)),
      query_starts(std::move(query_starts_)),
      seq_lens(std::move(seq_lens_)),
      block_tables(std::move(block_tables_)),
      slots(std::move(slots_)),
      page_size(page_size_),
      num_pages(num_pages_) {
  check(page_size > 0 && num_pages > 0, "batch: the KV cache has no pages");
  check(cache_slots.size() == positions.size(), "batch: cache_slots and positions differ in length");
  check(query_starts.size() == seq_lens.size() + 1, "batch: query_starts needs one entry more than seq_lens");
  check(query_starts.front() == 0 && query_starts.back() == rows(), "batch: query_starts must run from 0 to T");
  check(slots.empty() || slots.size() == seq_lens.size(), "batch: slots and seq_lens differ in length");
  check(sequences() == 0 || block_tables.size() % seq_lens.size() == 0, "batch: block_tables must be [S, P]");
  for (int64_t slot : cache_slots)
    check(slot >= 0 && slot < num_pages * page_size, "batch: a cache slot lies outside the KV cache");
  for (int64_t position : positions) check(position >= 0, "batch: a position is negative");
  for (int64_t s = 0; s < sequences(); ++s) {
    const int64_t queries = query_starts[s + 1] - query_starts[s];
    check(queries >= 0 && queries <= seq_lens[s], "batch: a sequence has more new rows than tokens");
    const int64_t pages = (seq_lens[s] + page_size - 1) / page_size;
    check(pages <= table_width(), "batch: a block table is shorter than its sequence");
    for (int64_t p = 0; p < pages; ++p) {
      const int32_t page = block_tables[s * table_width() + p];
      check(page >= 0 && page < num_pages, "batch: a block table names a page outside the KV cache");
    }
  }
}

void BatchView::set_drafts(std::vector<int32_t> state_lens_, std::vector<int32_t> num_verified_) {
  check(state_lens_.size() == seq_lens.size() && num_verified_.size() == seq_lens.size(),
        "batch: state_lens, num_verified and seq_lens differ in length");
  for (size_t s = 0; s < seq_lens.size(); ++s) {
    const int32_t queries = query_starts[s + 1] - query_starts[s];
    check(state_lens_[s] >= 0 && state_lens_[s] <= seq_lens[s] - queries,
          "batch: a fold holds tokens that are not there yet");
    check(num_verified_[s] >= 0 && num_verified_[s] <= queries, "batch: more rows are verified than there are");
  }
  state_lens = std::move(state_lens_);
  num_verified = std::move(num_verified_);
}

void DenseOps::fill_memory(float* data, int64_t bytes, float value) const {
  const int64_t floats = bytes / 4;
  pool.run([&](const Worker& w) {
    std::fill(data + floats * w.index / w.count, data + floats * (w.index + 1) / w.count, value);
  });
}

float DenseOps::read_memory(const void* data, int64_t bytes) const {
  std::vector<std::vector<ByteRange>> of_node;
  for (int n = 0; n < pool.nodes(); ++n) {
    const int64_t begin = pool.first_of(n, bytes / 1024) * 1024, end = pool.first_of(n + 1, bytes / 1024) * 1024;
    of_node.push_back({{static_cast<const uint8_t*>(data) + begin, end - begin}});
  }
  return read_ranges(of_node);
}

// In pieces for whoever is free, as experts are read. Cores that others share are slower; with equal shares all workers
// would wait for theirs (benchmarks/probes/reading.cc).
float DenseOps::read_ranges(const std::vector<std::vector<ByteRange>>& of_node) const {
  constexpr int64_t kPieceBytes = 1 << 20;
  std::vector<ByteRange> pieces;
  std::vector<int64_t> counts(size_t(pool.nodes()));
  for (size_t node = 0; node < of_node.size(); ++node)
    for (const ByteRange& range : of_node[node])
      for (int64_t at = 0; at < range.bytes; at += kPieceBytes, ++counts.at(node))
        pieces.push_back({range.data + at, std::min(kPieceBytes, range.bytes - at) / 1024 * 1024});
  std::vector<float> sums(size_t(pool.size()));
  const auto read = [&](int64_t i, const Worker& w) {
    sums[size_t(w.index)] += kernels.read_memory(pieces[size_t(i)].data, pieces[size_t(i)].bytes);
  };
  pool.run_phases({{int64_t(pieces.size()), read, counts.data()}});
  return std::accumulate(sums.begin(), sums.end(), 0.0f);
}

void DenseOps::rms_norm(const void* x, void* residual, const void* weight, void* out, int64_t rows, int64_t n,
                        float eps, DType type, DType weight_type) const {
  const int64_t stride = n * bytes_of(type);
  for_rows(pool, rows, n, [&](int64_t r) {
    kernels.rms_norm(static_cast<const char*>(x) + r * stride,
                     residual ? static_cast<char*>(residual) + r * stride : nullptr, weight,
                     static_cast<char*>(out) + r * stride, n, eps, type, weight_type);
  });
}

void DenseOps::rope_store(const BatchView& batch, const Heads& h, const RopeStore& a) const {
  for (int64_t position : batch.positions)
    check(position < a.table_rows, "rope_store: a position lies beyond the rotary tables (context length)");
  const int64_t size = bytes_of(a.type), head = h.head_dim * size;
  const int64_t value_bytes = a.v_pages ? h.kv_heads * h.value_dim * size : 0;
  const int64_t row_bytes = (h.heads + h.kv_heads) * head + value_bytes;
  for_rows(pool, batch.rows(), row_bytes / size, [&](int64_t t) {
    const char* q = static_cast<const char*>(a.qkv) + t * row_bytes;
    const char *k = q + h.heads * head, *v = k + h.kv_heads * head;
    const float *cos = a.cos + batch.positions[t] * a.half, *sin = a.sin + batch.positions[t] * a.half;
    const auto turn = [&](const char* from, char* to, int64_t count, const void* norm, int64_t norm_size) {
      const float whole = norm ? whole_row_rms(kernels, from, norm_size, h, a) : 0.0f;
      for (int64_t i = 0; i < count; ++i) {
        const bool own = norm && norm_size == h.head_dim;
        const float inv = own ? kernels.inverse_rms(from + i * head, h.head_dim, a.eps, a.type) : whole;
        const int64_t norm_head = h.head_dim * bytes_of(a.norm_type);
        const void* weight = norm && !own ? static_cast<const char*>(norm) + i * norm_head : norm;
        kernels.rotate_head(from + i * head, weight, inv, cos, sin, a.half, to + i * head, h.head_dim, a.type,
                            a.norm_type);
      }
    };
    const int64_t row = batch.cache_slots[t];
    turn(q, static_cast<char*>(a.q) + t * h.heads * head, h.heads, a.q_norm, h.q_norm_size);
    turn(k, static_cast<char*>(a.k_pages) + row * h.kv_heads * head, h.kv_heads, a.k_norm, h.k_norm_size);
    if (a.v_pages) std::copy_n(v, value_bytes, static_cast<char*>(a.v_pages) + row * value_bytes);
  });
}

}  // namespace tandem
