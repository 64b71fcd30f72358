// Router: scores, group limit, top-k, weights. Some hundred floats per token, so it needs no wide instructions.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ops/dense.h"
#include "ops/row_tasks.h"

namespace tandem {
namespace {

constexpr float kOut = -std::numeric_limits<float>::infinity();

void softmax(const float* logits, float* scores, int64_t n) {
  const float highest = *std::max_element(logits, logits + n);
  float sum = 0.0f;
  for (int64_t e = 0; e < n; ++e) sum += scores[e] = std::exp(logits[e] - highest);
  for (int64_t e = 0; e < n; ++e) scores[e] /= sum;
}

void sigmoid(const float* logits, float* scores, int64_t n) {
  for (int64_t e = 0; e < n; ++e) scores[e] = 1.0f / (1.0f + std::exp(-logits[e]));
}

// The k best indices of ranks, best first; equal ranks: lowest index first. NaN ranks lose against everything.
void top_k(const float* ranks, int64_t n, int64_t k, int32_t* ids) {
  const auto better = [&](float a, float b) { return a > b || (std::isnan(b) && !std::isnan(a)); };
  int64_t kept = 0;
  for (int32_t e = 0; e < n; ++e) {
    if (kept == k && !better(ranks[e], ranks[ids[k - 1]])) continue;
    int64_t place = kept < k ? kept++ : k - 1;
    for (; place > 0 && better(ranks[e], ranks[ids[place - 1]]); --place) ids[place] = ids[place - 1];
    ids[place] = e;
  }
}

// Takes the experts outside a token's best groups out of the race.
void limit_groups(const DenseOps::Route& a, std::vector<float>& ranks) {
  const int64_t size = a.experts / a.groups;
  std::vector<float> score(a.groups);
  std::vector<int32_t> kept(a.top_groups), best(2);
  for (int64_t g = 0; g < a.groups; ++g) {
    const float* group = ranks.data() + g * size;
    const int64_t count = std::min<int64_t>(size, a.group_by_top2 ? 2 : 1);
    top_k(group, size, count, best.data());
    score[g] = group[best[0]] + (count == 2 ? group[best[1]] : 0.0f);
  }
  top_k(score.data(), a.groups, a.top_groups, kept.data());
  for (int32_t g = 0; g < a.groups; ++g)
    if (std::find(kept.begin(), kept.end(), g) == kept.end()) std::fill_n(ranks.begin() + g * size, size, kOut);
}

void route_row(const DenseOps::Route& a, int64_t row) {
  thread_local std::vector<float> scores, ranks;
  scores.resize(a.experts);
  const float* logits = a.logits + row * a.experts;
  a.sigmoid ? sigmoid(logits, scores.data(), a.experts) : softmax(logits, scores.data(), a.experts);
  ranks = scores;
  if (a.bias)
    for (int64_t e = 0; e < a.experts; ++e) ranks[e] += a.bias[e];
  if (a.groups > 1) limit_groups(a, ranks);
  int32_t* ids = a.ids + row * (a.top_k + a.shared);
  float* weights = a.weights + row * (a.top_k + a.shared);
  top_k(ranks.data(), a.experts, a.top_k, ids);
  float sum = a.epsilon;
  for (int64_t i = 0; i < a.top_k; ++i) sum += weights[i] = scores[ids[i]];
  sum = std::max(sum, a.least_sum);
  for (int64_t i = 0; i < a.top_k; ++i) weights[i] = (a.normalize ? weights[i] / sum : weights[i]) * a.scale;
  for (int64_t i = 0; i < a.shared; ++i) {
    ids[a.top_k + i] = static_cast<int32_t>(a.experts + i);
    weights[a.top_k + i] = 1.0f;
  }
}

// A few additions per row, so one thread does it: batch 1 of 8 experts takes nanoseconds.
void count(const DenseOps::Route& a, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t* ids = a.ids + row * (a.top_k + a.shared);
    for (int64_t i = 0; i < a.top_k; ++i) {
      if (a.tokens) ++a.tokens[ids[i]];
      if (a.seen) a.seen[ids[i]] = 1;
    }
    if (a.chosen) std::copy_n(ids, a.top_k, a.chosen + row * a.top_k);
  }
}

}  // namespace

void DenseOps::route(int64_t rows, const Route& args) const {
  for_rows(pool, rows, 8 * args.experts, [&](int64_t row) { route_row(args, row); });
  if (args.tokens || args.seen || args.chosen) count(args, rows);
}

}  // namespace tandem
