// One batch through one layer: a parallel region of a few phases.
//
//   1 prepare   activations to the kernels' type (nothing to do if they are), or to integers
//   2 gate-up   task = some pairs of panels: gate and up, activation, to `hidden_`. All experts' pairs lie in a row,
//               once for each block of an expert's rows. So a task may end in another expert than it begins in
//     convert   rows of `hidden_` to integers, where the kernels take them; a row's groups lie across tasks of gate-up.
//               Few rows are no phase: whoever does the last of an expert's pairs converts its rows
//   3 down      task = some pairs of panels as in phase 2. Every row's result is kept. A token's are added up in the
//               order of their experts' ids. Few rows: whoever does the last task of a block of columns adds up
//               there. Many: in rounds of so many columns that some rounds' results fit a buffer of fixed size; a phase
//               is a round and the sums of the one before (down.cc)
//
// Few rows of foreseen experts: tasks of 2 are workers' own (foreseen_forward.cc).
#pragma once

#include <atomic>
#include <vector>

#include "experts/run/converted_rows.h"
#include "experts/run/own_pairs.h"
#include "experts/run/task_sizes.h"
#include "experts/store/expert_store.h"

namespace tandem {

class ExpertForward {
 public:
  ExpertForward(ExpertStore& layer, const ExpertCall& call);
  void run();

 private:
  struct Part {               // rows of one expert that are multiplied at once
    int32_t expert;           // index in the plan
    int32_t first_row, rows;  // of the plan
  };
  struct Pairs {
    int64_t first, count;
  };
  struct Tasks {  // of phases 2 and 3: the parts' pairs of panels in a row, cut for every node
    WeightView (ExpertStore::*weights)(int expert, size_t node) const;
    int64_t NodeSlice::* pairs;  // of a part,
    int64_t round, rounds;       // of which so many are done one after the other
    std::vector<Division> of_node;
    NodeTasks by_node;
  };
  struct DownStep {  // a phase of down: a round, then the sums of the one before
    ExpertForward* run;
    int64_t round;
    NodeTasks by_node;

    void operator()(int64_t index, const Worker& worker) const { run->do_step(*this, index, worker); }
    bool operator()(int64_t index, int64_t step) const { return run->fetch_of_step(*this, index, step); }
    bool operator()(int64_t index) const { return run->is_ready(*this, index); }
  };
  struct StepTask {
    size_t node;
    bool adds_up;
    int64_t index;  // of the round's tasks of the node; or of all of the sums
  };
  struct Piece {  // of a task: what it has of one part
    Part part;
    size_t node;
    WeightView weights;
    int32_t first_pair, pairs;  // of the node's
    const uint8_t* next;        // where it or its worker probably goes on; null: unknown
  };
  void list_parts();
  int64_t most_rows() const;  // of a part
  void divide(Tasks& tasks, const WeightView& layout) const;
  Pairs pairs_of(const Tasks& tasks, size_t node) const;  // in its round
  int64_t mean_rows() const;                              // per expert that has any
  bool has_many_rows() const;
  void choose_integers();
  bool takes_x(int64_t rows) const { return !layer_.shape_.mixed() && x_integers_.how().takes(rows); }
  int64_t converted_each(int64_t rows) const;  // per task
  int64_t tasks_of(const ConvertedRows& rows) const;
  void prepare(int64_t task);
  void convert(const ConvertedRows& rows, const PreparedRows& from, DType type, int64_t task) const;
  void count_pairs();
  void finish(const Piece& piece);
  // What multiplies rows [first, first + rows) of the plan, all of one expert; scratch.rows: where they are.
  MatmulFn find_x(const RoutingPlan::Expert& expert, int64_t first, int64_t rows, WorkerScratch& scratch) const;
  MatmulFn find_hidden(const RoutingPlan::Expert& expert, int64_t first, int64_t rows, WorkerScratch& scratch) const;
  Piece piece_at(const Tasks& tasks, size_t node, int64_t pair, int64_t end) const;
  const uint8_t* next_panels(const Tasks& tasks, NodeTasks::Place place) const;
  bool fetch(const Tasks& tasks, NodeTasks::Place place, int64_t step) const;
  static bool fetch_step(const Piece& piece, int64_t step);
  template <class Body>
  void for_pieces(const Tasks& tasks, NodeTasks::Place place, Body body) const;
  void multiply(MatmulFn kernel, const Piece& piece, int64_t x_stride, WorkerScratch& scratch) const;
  void multiply_each(const Piece& piece, WorkerScratch& scratch) const;
  void gate_up(const Piece& piece, WorkerScratch& scratch);
  void clear_padding(int64_t row);

  bool was_foreseen() const;
  void list_own();
  int64_t own_at_once() const;
  Piece own_piece(int64_t index) const;
  void own_gate_up(int64_t first, int64_t count, WorkerScratch& scratch);

  int64_t rounds_of_down() const;
  void list_down();
  void list_steps();
  int64_t products_of(int64_t round, size_t node) const;
  StepTask task_of(const DownStep& step, int64_t index) const;
  int64_t result_pairs() const;
  int64_t first_result_pair(const Tasks& round, size_t node) const;
  float* results_of(const Tasks& round) const;
  void do_step(const DownStep& step, int64_t index, const Worker& worker);
  bool fetch_of_step(const DownStep& step, int64_t index, int64_t at) const;
  bool is_ready(const DownStep& step, int64_t index) const;
  void down_task(const Tasks& round, NodeTasks::Place place, WorkerScratch& scratch);
  void down(const Tasks& round, const Piece& piece, WorkerScratch& scratch);
  const float* down_bias(int expert, int64_t pair) const;
  void store_sums(const float* sums, int64_t first_token, int64_t tokens, int64_t first_column, int64_t columns);
  void count_columns();
  void finish_columns(int64_t first_pair, int64_t pairs, WorkerScratch& scratch);
  void add_up_columns(int64_t block, WorkerScratch& scratch);
  void add_up_tokens(const Tasks& round, int64_t task, WorkerScratch& scratch);
  struct alignas(kCacheLine) Countdown {
    std::atomic<int32_t> left{0};
  };

  ExpertStore& layer_;
  const ExpertCall& call_;
  const RoutingPlan& plan_;
  Workspace& workspace_;
  const KernelTable& table_;
  DType hidden_type_;  // of prepared intermediate activations
  ConvertedRows x_integers_, hidden_integers_;
  bool prepares_;  // call_.x to `x_`, for experts that take no integers
  PreparedRows x_;
  PreparedRows hidden_;  // row i: intermediate activations of plan_.rows[i]
  std::vector<Part> parts_;
  Tasks gate_up_{&ExpertStore::gate_up, &NodeSlice::gate_up_pairs, 0, 1, {}, {}};
  OwnPairs own_;             // instead of gate_up_, where experts were foreseen
  std::vector<Tasks> down_;  // of each round
  std::vector<DownStep> steps_;
  bool converts_at_end_ = true;  // of an expert's pairs in phase 2, instead of in a phase
  // Pairs of gate_up, by index in the plan; in the end kComplete. Empty: they are not counted.
  std::vector<Countdown> unfinished_;
  static constexpr int32_t kComplete = -1;
  static constexpr int64_t kTokensPerSum = 8;
  bool in_rounds_ = false;                     // phase 3, and its results added up by tokens
  bool streams_ = false;                       // results past the caches
  float* results_ = nullptr;                   // of kRoundsKept rounds, of each row i of plan_.rows
  int64_t results_stride_ = 0;                 // floats
  std::vector<Countdown> unfinished_columns_;  // pairs of tasks of phase 3, by block of columns; empty in rounds
};

}  // namespace tandem
