#include "experts/routing_plan.h"

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

}  // namespace tandem
