#include "experts/live/expert_moves.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace tandem {
namespace {

std::string expert(int number) { return "expert " + std::to_string(number); }

std::string failed(int64_t bytes, int error) {
  return "a copy of " + std::to_string(bytes) + " bytes between CPU and GPU failed with CUDA's error " +
         std::to_string(error);
}

}  // namespace

ExpertMoves::ExpertMoves(std::shared_ptr<MovingLayers> layers, CopyAsync copy, const std::vector<Exchange>& exchanges,
                         const std::vector<uint64_t>& buffers)
    : layers_(std::move(layers)), copy_(copy) {
  if (exchanges.size() != buffers.size()) throw std::invalid_argument("each exchange needs a buffer");
  for (size_t i = 0; i < exchanges.size(); ++i) {
    if (exchanges[i].layer < 0 || size_t(exchanges[i].layer) >= layers_->count())
      throw std::invalid_argument("there is no MoE layer " + std::to_string(exchanges[i].layer));
    moves_.push_back(Move{exchanges[i], buffers[i]});
  }
}

template <class Action>
void ExpertMoves::each(const Action& action) {
  for (size_t i = 0; i < moves_.size(); ++i)
    if (moves_[i].lives) action(i);
}

void ExpertMoves::fail(size_t index, Fate fate, bool keeps_buffer, bool ends_layer, const std::string& why) {
  moves_[index].lives = false;
  if (ends_layer) end_layer(moves_[index]);
  troubles_.push_back({index, fate, keeps_buffer, ends_layer, why});
}

std::vector<ExpertMoves::Trouble> ExpertMoves::troubles() { return std::exchange(troubles_, {}); }

bool ExpertMoves::any_lives() const {
  return std::any_of(moves_.begin(), moves_.end(), [](const Move& move) { return move.lives; });
}

void ExpertMoves::check(const Move& move) const {
  const MovingLayers::Layer& layer = layers_->at(move.layer);
  if (!layer.cpu) throw std::invalid_argument("no experts move in this layer any more");
  for (const int number : {move.leaving, move.coming})
    if (number < 0 || number >= layer.cpu->shape().experts)
      throw std::invalid_argument("there is no " + expert(number));
  if (move.slot < 0 || move.slot >= layer.slot_count || layer.slot_of[move.leaving] != move.slot)
    throw std::invalid_argument(expert(move.leaving) + " is not in slot " + std::to_string(move.slot));
}

std::vector<ExpertMoves::Copy> ExpertMoves::prepared(Move& move) const {
  check(move);
  const MovingLayers::Layer& layer = layers_->at(move.layer);
  move.cpu = layer.cpu;
  std::vector<Copy> copies;
  for (const auto& [offset, here, bytes] : move.cpu->pieces(move.cpu->cpu_slot_of(move.coming)))
    copies.push_back({move.buffer + uint64_t(offset), reinterpret_cast<uint64_t>(here), bytes, true});
  move.cpu_slot = move.cpu->reserve(move.leaving);
  const uint64_t slot = layer.slots + uint64_t(move.slot * move.cpu->bytes_per_expert());
  for (const auto& [offset, here, bytes] : move.cpu->pieces(move.cpu_slot))
    copies.push_back({reinterpret_cast<uint64_t>(here), slot + uint64_t(offset), bytes, false});
  return copies;
}

int64_t ExpertMoves::begin(size_t index, void* up, void* down) {
  Move& move = moves_[index];
  try {
    return give(index, prepared(move), up, down);
  } catch (const std::exception& error) {
    if (move.cpu_slot >= 0) move.cpu->release(move.cpu_slot);
    fail(index, Fate::dropped, false, false, error.what());
    return 0;
  }
}

int64_t ExpertMoves::give(size_t index, const std::vector<Copy>& copies, void* up, void* down) {
  int64_t given = 0;
  for (const Copy& copy : copies) {
    if (const int error = copy_(copy.target, copy.source, size_t(copy.bytes), copy.up ? up : down)) {
      const bool lost = given > 0;  // copies may still write into its slot and its buffer
      if (!lost) moves_[index].cpu->release(moves_[index].cpu_slot);
      fail(index, Fate::dropped, lost, lost, failed(copy.bytes, error));
      return given;
    }
    given += copy.bytes;
  }
  return given;
}

void ExpertMoves::lose(const std::string& why) {
  each([&](size_t i) { fail(i, Fate::dropped, true, true, why); });
}

void ExpertMoves::assign(size_t index) {
  const Move& move = moves_[index];
  if (!move.lives) return;
  try {
    move.cpu->assign(move.leaving, move.cpu_slot);
    layers_->at(move.layer).slot_of[move.leaving] = -1;
  } catch (const std::exception& error) {
    fail(index, Fate::dropped, false, true, error.what());
  }
}

void ExpertMoves::forget_one(size_t index, int which, Fate fate) {
  try {
    moves_[index].cpu->forget(which);
  } catch (const std::exception& error) {
    fail(index, fate, false, true, expert(which) + " keeps its CPU memory: " + error.what());
  }
}

void ExpertMoves::undo(const std::string& why) {
  each([&](size_t i) {
    layers_->at(moves_[i].layer).slot_of[moves_[i].leaving] = moves_[i].slot;
    forget_one(i, moves_[i].leaving, Fate::dropped);
    if (moves_[i].lives) fail(i, Fate::dropped, false, false, why);
  });
}

void ExpertMoves::fill_slot(size_t index, void* stream) {
  const Move& move = moves_[index];
  if (!move.lives) return;
  const MovingLayers::Layer& layer = layers_->at(move.layer);
  const int64_t bytes = move.cpu->bytes_per_expert();
  if (const int error = copy_(layer.slots + uint64_t(move.slot * bytes), move.buffer, size_t(bytes), stream))
    fail(index, Fate::stranded, false, true, failed(bytes, error));
  else
    layer.slot_of[move.coming] = move.slot;
}

void ExpertMoves::strand(const std::string& why) {
  each([&](size_t i) {
    layers_->at(moves_[i].layer).slot_of[moves_[i].coming] = -1;
    fail(i, Fate::stranded, false, true, why);
  });
}

void ExpertMoves::forget() {
  each([&](size_t i) { forget_one(i, moves_[i].coming, Fate::done); });
}

}  // namespace tandem
