// Exchanges of experts between slots on the GPU and slots in CPU memory, which go together. Each step of one is a call
// of its own, so that `ExchangeTurn` can do them one at a time while a step runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "experts/live/exchange.h"
#include "experts/store/expert_store.h"

namespace tandem {

// `cuMemcpyAsync` of CUDA's driver, or what stands for it in a test: 0, or what is wrong.
using CopyAsync = int (*)(uint64_t target, uint64_t source, size_t bytes, void* stream);

// Both sides of the layers whose experts may move.
class MovingLayers {
 public:
  struct Layer {
    std::shared_ptr<ExpertStore> cpu;  // null: nothing moves in this layer, or not any more
    int32_t* slot_of = nullptr;        // [experts], -1: not on the GPU; what the GPU's tables are copied from
    uint64_t slots = 0;                // address of the first on the GPU
    int64_t slot_count = 0;
  };

  void add(Layer layer) { layers_.push_back(std::move(layer)); }
  size_t count() const { return layers_.size(); }
  Layer& at(int layer) { return layers_[size_t(layer)]; }

 private:
  std::vector<Layer> layers_;
};

// Some exchanges, one of a layer at most. What is done with each follows in the order declared; what fails is not
// touched any more, and is in `troubles` once. Nothing throws but the constructor.
class ExpertMoves {
 public:
  enum class Fate { dropped, stranded, done };
  struct Trouble {
    size_t index;
    Fate fate;          // done: it was made, but its layer has ended
    bool keeps_buffer;  // copies may still write there
    bool ends_layer;
    std::string why;
  };

  // buffers: for each exchange the address on the GPU of memory for an expert. Throws std::invalid_argument if there
  // are not as many, or a layer does not exist.
  ExpertMoves(std::shared_ptr<MovingLayers> layers, CopyAsync copy, const std::vector<Exchange>& exchanges,
              const std::vector<uint64_t>& buffers);

  size_t count() const { return moves_.size(); }
  bool any_lives() const;

  // Reserves a CPU slot for the leaving expert. Copies the coming one to its buffer, on the stream `up`, and the
  // leaving one to its CPU slot, on `down`. Returns the bytes given.
  int64_t begin(size_t index, void* up, void* down);
  void lose(const std::string& why);  // all: copies have failed, and slots and buffers may still be written to
  // Everything has arrived. The leaving expert is in CPU memory from now on, and in no slot;
  void assign(size_t index);
  void undo(const std::string& why);  // ... or not, none of them: they stay in their slots.
  // Copies the buffer to the slot on `stream`, where the coming expert is from now on;
  void fill_slot(size_t index, void* stream);
  void strand(const std::string& why);  // ... or not, none of them: they stay in CPU memory, and the slots are lost.
  void forget();                        // All coming experts are in CPU memory no longer.

  std::vector<Trouble> troubles();  // since the last call

 private:
  struct Move : Exchange {
    uint64_t buffer;
    std::shared_ptr<ExpertStore> cpu = nullptr;
    int32_t cpu_slot = -1;
    bool lives = true;
  };
  struct Copy {
    uint64_t target, source;
    int64_t bytes;
    bool up;
  };

  template <class Action>
  void each(const Action& action);
  std::vector<Copy> prepared(Move& move) const;
  int64_t give(size_t index, const std::vector<Copy>& copies, void* up, void* down);
  void check(const Move& move) const;
  void end_layer(const Move& move) { layers_->at(move.layer).cpu.reset(); }
  void forget_one(size_t index, int expert, Fate fate);
  void fail(size_t index, Fate fate, bool keeps_buffer, bool ends_layer, const std::string& why);

  std::shared_ptr<MovingLayers> layers_;
  CopyAsync copy_;
  std::vector<Move> moves_;
  std::vector<Trouble> troubles_;
};

}  // namespace tandem
