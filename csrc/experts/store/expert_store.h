// The routed experts of one layer, packed: gated MLPs of equal shape, and the driver that runs a batch through them.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "experts/run/routing_plan.h"
#include "experts/store/cpu_slots.h"
#include "experts/store/node_slices.h"
#include "format/pack.h"
#include "ops/workspace.h"
#include "runtime/files/mapped_file.h"
#include "runtime/fill.h"

namespace tandem {

// Without a gate, rows of `up` are the first half of an expert's, in the place of gate's, and the second half. Both
// halves are whole panels, so that each lands in its half of the intermediate activations.
struct ExpertShape {
  int experts;
  int hidden;
  int width;  // of one expert's intermediate activations
  WeightFormat gate, up, down;
  Activation activation;
  int cpu_slots = 0;              // experts that there is memory for; 0: all of them
  bool int8_activations = false;  // rounded before both products: an explicit choice that costs accuracy

  bool gated() const { return is_gated(activation.kind); }
  bool mixed() const { return !(gate == up); }
  int gate_rows() const { return gated() ? width : width / 2; }  // and as many of up
};

// Weights of one expert as the checkpoint has them.
struct ExpertSource {
  MatrixSource gate, up;  // [gate_rows, hidden]
  MatrixSource down;      // [hidden, width]
};

// Of all experts, float; any may be null.
struct ExpertBiases {
  const float *gate, *up;  // [experts, gate_rows]
  const float* down;       // [experts, hidden]
};

struct ExpertCall {
  RowsView x;            // [tokens, hidden]
  const int32_t* ids;    // [tokens, top_k]
  const float* weights;  // [tokens, top_k]
  int64_t top_k;
  void* out;  // [tokens, hidden]
  DType out_type;
  bool add;                                        // out += instead of out =
  const std::vector<int32_t>* foreseen = nullptr;  // experts whose shares of gate_up were fetched, in this order
};

class ExpertStore {
 public:
  ExpertStore(std::shared_ptr<Workspace> workspace, const ExpertShape& shape);

  const ExpertShape& shape() const { return shape_; }
  const Workspace& workspace() const { return *workspace_; }
  int64_t bytes_per_expert() const { return expert_bytes_; }
  // Of the experts [first, first + count), for each memory node; in place, of each matrix. Throws std::out_of_range,
  // and std::invalid_argument if they do not lie side by side.
  std::vector<ByteRange> bytes(int first, int count) const;

  // gate_up of an expert that is loaded, of each memory node (in place: of gate and of up), by pairs of panels, divided
  // among the node's workers as OwnPairs divides it.
  std::vector<SharedRange> shared_gate_up(int expert) const;

  // Weights that will be read after this layer: idle workers fetch them once it is computed.
  void read_next(std::vector<ByteRange> upcoming) { upcoming_ = std::move(upcoming); }

  // The packed form, for whoever keeps or computes experts elsewhere: of an expert, first gate_up, then down. Where
  // gate and up have two formats, these are gate's panels, but a pair's bytes are those of both.
  const WeightView& gate_up_layout() const { return gate_up_layout_; }
  const WeightView& down_layout() const { return down_layout_; }
  bool is_loaded(int expert) const { return cpu_slots_.has(expert); }
  bool in_file() const { return file_ != nullptr; }
  // Whether experts are used where the caller has them, in whole rows (Format::bf16_rows), instead of being packed.
  // Nothing could be copied or moved then. The caller keeps the memory for as long as they are here.
  bool in_place() const { return shape_.gate.format == Format::bf16_rows; }
  int loaded() const { return cpu_slots_.taken(); }    // experts that are
  void copy_packed(int expert, uint8_t* to) const;     // bytes_per_expert() of them, of all memory nodes
  void load_packed(int expert, const uint8_t* bytes);  // the inverse
  // The same of many, one after the other in `to`, and what `load` would make of such experts; on all workers
  // (expert_bytes.cc). The first reads the file that this layer lies in, if it does, and leaves its mapping alone.
  void copy_all(const std::vector<int>& experts, uint8_t* to) const;
  void pack_to(const std::vector<ExpertSource>& sources, uint8_t* to) const;
  // Copies these out of a layer of the same shape on the same workers. Throws std::invalid_argument for any other.
  void load_from(const ExpertStore& other, const std::vector<int>& experts);
  // The expert lives elsewhere from now on, and its slot is free. Throws std::invalid_argument if it is not loaded.
  void forget(int expert);

  // What is needed to move experts by somebody else's copies. `reserve` gives a slot for one on its way here, which
  // nobody uses until `assign` says whose it is. They throw std::invalid_argument where that cannot be.
  struct Piece {
    int64_t offset;  // in the expert's packed bytes, as copy_packed gives them
    uint8_t* here;
    int64_t bytes;
  };
  int32_t reserve(int expert);
  void assign(int expert, int32_t cpu_slot);
  void release(int32_t cpu_slot);
  int32_t cpu_slot_of(int expert) const;
  std::vector<Piece> pieces(int32_t cpu_slot);   // in the order of their offsets, as few as can be
  std::vector<ByteRange> all_cpu_slots() const;  // of each memory node (see `bytes`); empty while nothing was loaded
  ByteRange own() const;                         // the memory that slots lie in; none if they lie in a file
  int64_t experts_used() const { return int64_t(plan_.experts.size()); }  // by the last chunk of the last batch

  // Packs one expert on the pool. Throws std::out_of_range for an expert that does not exist.
  void load(int expert, const ExpertSource& source);

  // Packs them in one parallel region, so that small experts share it; in place, makes sure that they can be read
  // (files are mapped; throws UnreadableFile where one has become shorter).
  void load_all(const std::vector<int>& experts, const std::vector<ExpertSource>& sources);

  // Of all experts, wherever they live: they are small, and so experts may come and go without them. They are copied.
  void set_biases(const ExpertBiases& biases);

  // What `load` has packed, as it lies in memory (see NodeSlice). Throws std::invalid_argument for a layer that has no
  // slot for some of its experts.
  ByteRange packed() const;
  // Takes them from before, from a layer with as many nodes and workers: the panels are read where they lie in `file`.
  // Throws std::invalid_argument if sizes do not fit.
  void adopt(std::shared_ptr<const MappedFile> file, int64_t offset);

  // out[t] = sum over slots of weights[t, slot] * expert[ids[t, slot]](x[t]). A token's experts are added in the order
  // of their ids, so the result does not depend on the batch. Large batches run in chunks of fixed scratch. Throws
  // std::invalid_argument for an expert that has not been loaded.
  void forward(const ExpertCall& call);

 private:
  WeightView gate_up(int expert, size_t node) const;  // what a node has of it; of two formats, gate alone
  WeightView up(const WeightView& gate) const;        // of two formats: what lies behind such a gate
  WeightView down(int expert, size_t node) const;
  void check_sources(const std::vector<int>& experts, const std::vector<ExpertSource>& sources) const;
  void check_formats(const ExpertSource& source) const;
  static std::vector<int32_t> take_cpu_slots(NewCpuSlots& taken, const std::vector<int>& experts);
  // fill(node, piece) for all pieces of these slots, which are new memory where they follow each other.
  template <class FirstFrom, class Fill>
  void fill_cpu_slots(const std::vector<int32_t>& cpu_slots, const FirstFrom& first_from, const Fill& fill);
  // `to`: where a node has the expert.
  void pack_panel_of(uint8_t* to, const ExpertSource& source, const NodeSlice& slice, int64_t panel) const;
  template <class Copy>
  void copy_pieces(int expert, Copy copy) const;
  int64_t memory_bytes() const { return bytes_of(slices_, cpu_slots_.count()); }
  void own_memory();  // of all slots, when the first is loaded; throws when they lie in a file
  struct Rows {
    const uint8_t *gate, *up, *down;
  };
  std::array<ByteRange, 3> matrices(const Rows& rows) const;
  std::vector<ByteRange> rows_of(int first, int count) const;  // in place: of those experts that are here
  void take_rows(const std::vector<int>& experts, const std::vector<ExpertSource>& sources);
  void check_packed() const;       // throws std::invalid_argument where experts are used in place
  void check_activations() const;  // throws std::invalid_argument if the tier has no kernels for them
  // The first panel that begins there or later in an expert's bytes of that node.
  int64_t first_panel_from(const NodeSlice& slice, int64_t offset) const;
  // What a node has of an expert: stretches of equal panels, which follow each other there.
  struct Stretch {
    int64_t whole;  // where it begins in the whole packed expert
    int64_t panels, panel_bytes;
    int64_t bytes() const { return panels * panel_bytes; }
  };
  std::array<Stretch, 3> stretches(const NodeSlice& slice) const;
  int64_t tokens_per_chunk(int64_t top_k) const;
  void check_loaded() const;
  void leave_out(const ExpertCall& call) const;
  void run_chunk(const ExpertCall& call, int64_t first, int64_t tokens);

  friend class ExpertForward;

  std::shared_ptr<Workspace> workspace_;
  ExpertShape shape_;
  WeightView gate_up_layout_;  // panels alternate: 16 columns of gate, the same 16 of up; of two formats: see up()
  WeightView up_layout_;       // the same, where gate and up have one format
  WeightView down_layout_;
  int64_t expert_bytes_;
  std::vector<NodeSlice> slices_;           // by memory node
  HugeBuffer memory_;                       // the panels (none before the first load), or
  std::shared_ptr<const MappedFile> file_;  // what they lie in
  const uint8_t* panels_ = nullptr;
  std::vector<Rows> rows_;                       // in place: where each expert lies
  std::vector<float> gate_up_bias_, down_bias_;  // padded, of all experts; empty: there are none
  CpuSlots cpu_slots_;
  RoutingPlan plan_;
  std::vector<ByteRange> upcoming_;
};

template <class FirstFrom, class Fill>
void ExpertStore::fill_cpu_slots(const std::vector<int32_t>& cpu_slots, const FirstFrom& first_from, const Fill& fill) {
  // While a layer is filled, slots follow each other, and so does their memory.
  bool together = true;
  for (size_t i = 1; i < cpu_slots.size(); ++i) together &= cpu_slots[i] == cpu_slots[i - 1] + 1;
  std::vector<NewMemory> memory;  // elsewhere only its size is right: pieces are given out one by one
  for (const NodeSlice& slice : slices_) {
    uint8_t* begin =
        memory_.data() + slice.offset + (together && !cpu_slots.empty() ? cpu_slots[0] : 0) * slice.expert_bytes;
    memory.push_back({begin, begin + slice.expert_bytes * int64_t(cpu_slots.size())});
  }
  if (together)
    fill_new(workspace_->pool(), memory, first_from, fill);
  else
    fill_known(workspace_->pool(), memory, first_from, fill);
}

}  // namespace tandem
