#include "experts/store/node_slices.h"

namespace tandem {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;

int64_t rounded_up(int64_t bytes) { return (bytes + kHugePage - 1) / kHugePage * kHugePage; }

}  // namespace

std::vector<NodeSlice> cut_by_node(const WeightView& gate_up, int64_t together, const WeightView& down, int experts,
                                   const WorkerPool& pool) {
  std::vector<NodeSlice> slices;
  int64_t offset = 0;
  for (int node = 0; node < pool.nodes(); ++node) {
    const auto begin = [&](int n) { return together * pool.first_of(n, gate_up.pairs / together); };
    const int64_t first_gate_up = begin(node), first_down = pool.first_of(node, down.pairs);
    const int64_t gate_up_pairs = begin(node + 1) - first_gate_up;
    const int64_t down_pairs = pool.first_of(node + 1, down.pairs) - first_down;
    const int64_t bytes = gate_up_pairs * gate_up.pair_bytes + down_pairs * down.pair_bytes;
    slices.push_back({first_gate_up, gate_up_pairs, first_down, down_pairs, offset, bytes});
    offset = rounded_up(offset + bytes * experts);
  }
  return slices;
}

int64_t bytes_of(const std::vector<NodeSlice>& slices, int experts) {
  return slices.back().offset + slices.back().expert_bytes * experts;
}

}  // namespace tandem
