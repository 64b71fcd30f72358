// One batch through one layer: a single parallel region of three phases, or four.
//
//   1 prepare   activations to the kernels' type (nothing to do if they are)
//   2 gate-up   task = (expert, block of its rows, block of panel pairs): gate and up, activation, to `hidden_`
//     round     int8 activations only: rows of `hidden_` to `codes_`; a row's groups lie across tasks of gate-up
//   3 down      task = (block of tokens, block of output columns): runs over the experts in the order of their ids and
//               sums the weighted results in the worker's scratch, so there is neither a buffer of tokens x top_k
//               results nor a pass that adds them up, and a crowded expert cannot unbalance the phase
#pragma once

#include "experts/expert_layer.h"

namespace tandem {

class ExpertRun {
 public:
  ExpertRun(ExpertLayer& layer, const ExpertCall& call);
  void run();

 private:
  struct GateUpTask {
    int32_t expert;             // index in the plan
    int32_t first_row, rows;    // of the plan
    int32_t first_pair, pairs;  // of the node's
  };
  struct Grid {  // of phase 3
    int64_t tokens_each, token_blocks;
    int64_t pairs_each;
  };

  void list_gate_up_tasks();
  template <class Next>
  void list_gate_up_tasks(int32_t expert, int64_t pairs, Next next_pairs);
  int64_t mean_rows() const;  // per expert that has any
  bool has_many_rows() const;
  Grid down_grid() const;
  Grid streaming_grid() const;
  Grid multiplying_grid() const;
  int64_t rows_each(int64_t rows) const;  // per task of phases that prepare rows
  void prepare(int64_t task);
  void prepare_some(int64_t first, int64_t last);
  void round(int64_t task);
  MatmulFn kernel_for(const WeightView& weights, int64_t rows) const;
  const uint8_t* panels_of(size_t node, int64_t task) const;
  void gate_up(int64_t index, WorkerScratch& scratch);
  void clear_padding(int64_t row);
  int64_t column_blocks(const NodeSlice& slice) const;
  void down(int64_t index, WorkerScratch& scratch);
  struct DownBlock {  // a task of phase 3
    size_t node;
    int64_t first_token, tokens;
    int64_t first_pair, pairs;  // of the node's
  };
  void down_expert(const RoutingPlan::Expert& expert, const DownBlock& block, const uint8_t* next_panel,
                   int64_t first_row, int64_t last_row, WorkerScratch& scratch);

  ExpertLayer& layer_;
  const ExpertCall& call_;
  const RoutingPlan& plan_;
  Workspace& workspace_;
  const KernelTable& table_;
  DType hidden_type_;  // of prepared intermediate activations
  bool int8_;
  bool prepared_;  // call_.x needs no conversion
  PreparedRows x_;
  PreparedRows hidden_;            // row i: intermediate activations of plan_.rows[i]
  PreparedRows codes_;             // the same, as down's kernels read them
  std::vector<GateUpTask> tasks_;  // node after node
  NodeTasks gate_up_tasks_, down_tasks_;
  Grid grid_;
};

}  // namespace tandem
