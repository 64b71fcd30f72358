// Which rows each expert gets: the routing of a batch turned from tokens into experts.
#pragma once

#include <stddef.h>

#include <cstdint>
#include <span>
#include <vector>

namespace tandem {

// One (token, slot) that is computed.
struct RoutedRow {
  int32_t token;
  float weight;
};

// Rows sorted by expert, then token, then slot. `rows[i]` is also row i of the intermediate activations.
struct RoutingPlan {
  struct Expert {
    int32_t id;
    int32_t first;  // of `rows`
    int32_t count;
  };
  std::vector<RoutedRow> rows;
  std::vector<Expert> experts;  // with at least one row, ascending id

  // ids, weights: [tokens, top_k]. Ids below 0 or >= num_experts are skipped.
  void build(const int32_t* ids, const float* weights, int64_t tokens, int64_t top_k, int num_experts);

  // Which rows each token has, ascending: once that is listed.
  void list_by_token(int64_t tokens);
  std::span<const int32_t> rows_of(int64_t token) const {
    return {by_token_.data() + first_of_[size_t(token)], by_token_.data() + first_of_[size_t(token) + 1]};
  }

 private:
  std::vector<int32_t> next_;  // by expert id, or token: where its next row goes
  std::vector<int32_t> by_token_, first_of_;
};

}  // namespace tandem
