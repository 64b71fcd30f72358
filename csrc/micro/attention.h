// Online-softmax attention of query rows over a block of keys held as f32 rows. A row's arithmetic depends on the key
// positions only, never on which other rows share the block: that is what makes results independent of batching.
#pragma once

#include <type_traits>

#include "micro/row_runs.h"
#include "micro/vector_math.h"

namespace tandem {
namespace {

constexpr float kMinusInfinity = -__builtin_inff();

template <class Isa>
struct Attention : Rows<Isa> {
  using R = Rows<Isa>;
  using Vec = typename Isa::Vec;

  // Scores below the largest by more than 87 count as 1.6e-38: nothing beside the largest weight, 1.
  static float scalar_exp(float x) {
    alignas(64) float lanes[kRowLanes];
    Isa::store(lanes, vector_exp<Isa>(Isa::set1(x)));
    return lanes[0];
  }

  // Scores of `keys` keys for kRows query rows. Each number of q and k is loaded once for several products; a product's
  // own order over the elements stays the same.
  template <int kRows, int kKeys>
  static void dot_keys(const float* q, const float* k, int64_t padded, float* out, int64_t stride) {
    Vec sum[kRows][kKeys];
    for (int r = 0; r < kRows; ++r)
      for (int j = 0; j < kKeys; ++j) sum[r][j] = Isa::zero();
    for (int64_t i = 0; i < padded; i += kRowLanes) {
      Vec key[kKeys];
      for (int j = 0; j < kKeys; ++j) key[j] = Isa::load(k + j * padded + i);
      for (int r = 0; r < kRows; ++r) {
        const Vec qi = Isa::load(q + r * padded + i);
        for (int j = 0; j < kKeys; ++j) sum[r][j] = Isa::fma(qi, key[j], sum[r][j]);
      }
    }
    for (int r = 0; r < kRows; ++r)
      if constexpr (kKeys == 4)
        Isa::reduce_add_four(sum[r], out + r * stride);
      else
        for (int j = 0; j < kKeys; ++j) out[r * stride + j] = Isa::reduce_add(sum[r][j]);
  }

  // scores[0, keys) -> exp(score - new max), padded to whole runs. Returns the factor for what was summed before.
  static float soften(float* scores, int64_t keys, AttentionState* state) {
    const int64_t whole = (keys + kRowLanes - 1) / kRowLanes * kRowLanes;
    for (int64_t j = keys; j < whole; ++j) scores[j] = kMinusInfinity;
    Vec largest = Isa::set1(state->max);
    for (int64_t j = 0; j < whole; j += kRowLanes) largest = Isa::max(Isa::load(scores + j), largest);
    const float highest = Isa::reduce_max(largest);
    Vec total = Isa::zero();
    for (int64_t j = 0; j < whole; j += kRowLanes) {
      const Vec p = vector_exp<Isa>(Isa::sub(Isa::load(scores + j), Isa::set1(highest)));
      Isa::store(scores + j, p);
      total = Isa::add(total, p);
    }
    const float factor = scalar_exp(state->max - highest);
    state->sum = state->sum * factor + Isa::reduce_add(total);
    state->max = highest;
    return factor;
  }

  // acc[r] = acc[r] * factors[r] + weights[r] . v, of kRuns runs of each of kRows rows.
  template <int kRows, int kRuns>
  static void add_values(const float* weights, int64_t stride, const float* v, int64_t keys, int64_t padded,
                         const float* factors, float* acc) {
    Vec sum[kRows][kRuns];
    for (int r = 0; r < kRows; ++r)
      for (int i = 0; i < kRuns; ++i)
        sum[r][i] = Isa::mul(Isa::load(acc + r * padded + i * kRowLanes), Isa::set1(factors[r]));
    for (int64_t j = 0; j < keys; ++j) {
      Vec value[kRuns];
      for (int i = 0; i < kRuns; ++i) value[i] = Isa::load(v + j * padded + i * kRowLanes);
      for (int r = 0; r < kRows; ++r) {
        const Vec w = Isa::set1(weights[r * stride + j]);
        for (int i = 0; i < kRuns; ++i) sum[r][i] = Isa::fma(w, value[i], sum[r][i]);
      }
    }
    for (int r = 0; r < kRows; ++r)
      for (int i = 0; i < kRuns; ++i) Isa::store(acc + r * padded + i * kRowLanes, sum[r][i]);
  }

  template <int kRows>
  static void attend_rows(const float* q, const float* k, const float* v, int64_t keys, int64_t padded, float* scratch,
                          AttentionState* states, float* acc) {
    const int64_t stride = (keys + kRowLanes - 1) / kRowLanes * kRowLanes;
    int64_t j = 0, i = 0;
    for (; j + 4 <= keys; j += 4) dot_keys<kRows, 4>(q, k + j * padded, padded, scratch + j, stride);
    for (; j < keys; ++j) dot_keys<kRows, 1>(q, k + j * padded, padded, scratch + j, stride);
    float factors[kRows];
    for (int r = 0; r < kRows; ++r) factors[r] = soften(scratch + r * stride, keys, &states[r]);
    for (; i + 4 * kRowLanes <= padded; i += 4 * kRowLanes)
      add_values<kRows, 4>(scratch, stride, v + i, keys, padded, factors, acc + i);
    for (; i < padded; i += kRowLanes) add_values<kRows, 1>(scratch, stride, v + i, keys, padded, factors, acc + i);
  }

  static void attend(const float* q, const float* k, const float* v, int64_t rows, int64_t begin, int64_t end,
                     int64_t padded, float* scratch, AttentionState* states, float* acc) {
    if (begin >= end) return;
    k += begin * padded;
    v += begin * padded;
    const auto some = [&](auto count, int64_t r) {
      attend_rows<count>(q + r * padded, k, v, end - begin, padded, scratch, states + r, acc + r * padded);
    };
    int64_t r = 0;
    static_assert(Isa::kAttentionRows <= kAttentionRows, "callers give scratch for so many rows");
    if constexpr (Isa::kAttentionRows > 1)
      for (; r + Isa::kAttentionRows <= rows; r += Isa::kAttentionRows)
        some(std::integral_constant<int, Isa::kAttentionRows>{}, r);
    for (; r < rows; ++r) some(std::integral_constant<int, 1>{}, r);
  }

  static void merge(AttentionState* into, float* acc, const AttentionState* from, const float* from_acc,
                    int64_t padded) {
    if (from->max == kMinusInfinity) return;
    const float highest = into->max > from->max ? into->max : from->max;
    const float mine = scalar_exp(into->max - highest), theirs = scalar_exp(from->max - highest);
    for (int64_t i = 0; i < padded; i += kRowLanes) {
      const Vec kept = Isa::mul(Isa::load(acc + i), Isa::set1(mine));
      Isa::store(acc + i, Isa::fma(Isa::load(from_acc + i), Isa::set1(theirs), kept));
    }
    into->sum = into->sum * mine + from->sum * theirs;
    into->max = highest;
  }

  template <DType type>
  static void widen_as(const void* x, int64_t stride, int64_t rows, float scale, float* out, int64_t d,
                       int64_t padded) {
    const Vec factor = Isa::set1(scale);
    for (int64_t r = 0; r < rows; ++r, out += padded) {
      const void* row = static_cast<const char*>(x) + r * stride;
      R::for_runs(
          d, [&](int64_t i, int64_t m) { Isa::store(out + i, Isa::mul(R::template load_n<type>(row, i, m), factor)); });
      for (int64_t i = (d + kRowLanes - 1) / kRowLanes * kRowLanes; i < padded; i += kRowLanes)
        Isa::store(out + i, Isa::zero());
    }
  }

  template <DType type>
  static void narrow_as(const float* x, float scale, void* out, int64_t d) {
    R::for_runs(d, [&](int64_t i, int64_t m) {
      R::template store_n<type>(out, i, m, Isa::mul(Isa::load(x + i), Isa::set1(scale)));
    });
  }
};

template <class Isa>
void widen(const void* x, int64_t stride, int64_t rows, float scale, float* out, int64_t d, int64_t padded,
           DType type) {
  type == DType::bf16 ? Attention<Isa>::template widen_as<DType::bf16>(x, stride, rows, scale, out, d, padded)
                      : Attention<Isa>::template widen_as<DType::f32>(x, stride, rows, scale, out, d, padded);
}

template <class Isa>
void narrow(const float* x, float scale, void* out, int64_t d, DType type) {
  type == DType::bf16 ? Attention<Isa>::template narrow_as<DType::bf16>(x, scale, out, d)
                      : Attention<Isa>::template narrow_as<DType::f32>(x, scale, out, d);
}

// Scores of tokens for one query row: what small heads say of each key, as far as it is positive, in a weighted sum.
// Heads lie side by side, so nothing is added up across lanes but once a key, and a key's score depends on nothing
// else.
template <class Isa>
struct TokenScores {
  using Vec = typename Isa::Vec;
  static constexpr int kRuns = 2;  // of heads at a time

  // scores[j] += sum over the heads of `runs` runs of gate * max(0, q . k_j).
  template <int kKeys, int runs>
  static void add_heads(const float* q, const float* gates, const float* k, int64_t heads, int64_t dim, int64_t stride,
                        Vec* scores) {
    Vec sum[kKeys][runs];
    for (int j = 0; j < kKeys; ++j)
      for (int r = 0; r < runs; ++r) sum[j][r] = Isa::zero();
    for (int64_t i = 0; i < dim; ++i, q += heads)
      for (int r = 0; r < runs; ++r) {
        const Vec qi = Isa::load(q + r * kRowLanes);
        for (int j = 0; j < kKeys; ++j) sum[j][r] = Isa::fma(qi, Isa::set1(k[j * stride + i]), sum[j][r]);
      }
    for (int r = 0; r < runs; ++r) {
      const Vec gate = Isa::load(gates + r * kRowLanes);
      for (int j = 0; j < kKeys; ++j) scores[j] = Isa::fma(gate, Isa::max(sum[j][r], Isa::zero()), scores[j]);
    }
  }

  template <int kKeys>
  static void some_keys(const float* q, const float* gates, const float* k, int64_t heads, int64_t dim, int64_t stride,
                        float* out) {
    Vec scores[kKeys];
    for (int j = 0; j < kKeys; ++j) scores[j] = Isa::zero();
    int64_t h = 0;
    for (; h + kRuns * kRowLanes <= heads; h += kRuns * kRowLanes)
      add_heads<kKeys, kRuns>(q + h, gates + h, k, heads, dim, stride, scores);
    for (; h < heads; h += kRowLanes) add_heads<kKeys, 1>(q + h, gates + h, k, heads, dim, stride, scores);
    for (int j = 0; j < kKeys; ++j) out[j] = Isa::reduce_add(scores[j]);
  }

  static void scores(const float* q, const float* gates, const float* k, int64_t heads, int64_t dim, int64_t stride,
                     int64_t keys, float* out) {
    int64_t j = 0;
    for (; j + 4 <= keys; j += 4) some_keys<4>(q, gates, k + j * stride, heads, dim, stride, out + j);
    for (; j < keys; ++j) some_keys<1>(q, gates, k + j * stride, heads, dim, stride, out + j);
  }
};

}  // namespace
}  // namespace tandem
