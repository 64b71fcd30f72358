#include "experts/run/routing_plan.h"

namespace tandem {

void RoutingPlan::build(const int32_t* ids, const float* weights, int64_t tokens, int64_t top_k, int num_experts) {
  const auto exists = [=](int32_t id) { return id >= 0 && id < num_experts; };
  next_.assign(size_t(num_experts), 0);
  for (int64_t i = 0; i < tokens * top_k; ++i)
    if (exists(ids[i])) ++next_[size_t(ids[i])];
  experts.clear();
  int32_t total = 0;
  for (int32_t id = 0; id < num_experts; ++id) {
    const int32_t count = next_[size_t(id)];
    if (count) experts.push_back({id, total, count});
    next_[size_t(id)] = total;
    total += count;
  }
  rows.resize(size_t(total));
  for (int64_t i = 0; i < tokens * top_k; ++i)
    if (exists(ids[i])) rows[size_t(next_[size_t(ids[i])]++)] = {int32_t(i / top_k), weights[i]};
}

void RoutingPlan::list_by_token(int64_t tokens) {
  first_of_.assign(size_t(tokens) + 1, 0);
  for (const RoutedRow& row : rows) ++first_of_[size_t(row.token) + 1];
  for (size_t t = 0; t < size_t(tokens); ++t) first_of_[t + 1] += first_of_[t];
  next_.assign(first_of_.begin(), first_of_.end() - 1);
  by_token_.resize(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) by_token_[size_t(next_[size_t(rows[i].token)]++)] = int32_t(i);
}

}  // namespace tandem
