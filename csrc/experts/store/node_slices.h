// How a layer's experts are divided among the memory nodes of a host. Each node holds some of every expert's columns of
// gate and up, and some of down's output columns. Its workers compute those. So all nodes read their own memory at the
// same time, whichever experts a token needs. Only activations and results cross. One worker makes every sum, as on one
// node: results have the same bits for any number of nodes.
#pragma once

#include <cstdint>
#include <vector>

#include "abi/weight_view.h"
#include "runtime/worker_pool.h"

namespace tandem {

struct NodeSlice {
  int64_t first_gate_up, gate_up_pairs;  // pairs of panels
  int64_t first_down, down_pairs;
  int64_t offset;        // of its first expert, from where the layer's memory begins: a multiple of a huge page
  int64_t expert_bytes;  // of one expert here: panels of gate_up (of gate, then of up, where they differ), then of down
};

// Columns are divided in proportion to the nodes' workers. With one node, experts lie one after the other, whole.
// together: pairs of gate_up that a node has all of, or none.
std::vector<NodeSlice> cut_by_node(const WeightView& gate_up, int64_t together, const WeightView& down, int experts,
                                   const WorkerPool& pool);

// Of the memory that slices describe.
int64_t bytes_of(const std::vector<NodeSlice>& slices, int experts);

}  // namespace tandem
