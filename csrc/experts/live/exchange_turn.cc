#include "experts/live/exchange_turn.h"

#include <chrono>
#include <string>

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

std::string cuda_error(int error) { return "CUDA's error " + std::to_string(error); }

}  // namespace

Meanwhile::Progress ExchangeTurn::piece() noexcept {
  switch (stage_.load(std::memory_order_acquire)) {
    case Stage::assign:
      return assign_one();
    case Stage::ended:
      return Progress::ended;
    default:
      return Progress::waits;
  }
}

Meanwhile::Progress ExchangeTurn::assign_one() {
  moves_->assign(index_);
  go_on(Stage::assign, Stage::hide);
  return Progress::did;
}

Meanwhile::Progress ExchangeTurn::piece_of_step() noexcept {
  switch (stage_.load(std::memory_order_acquire)) {
    case Stage::begin:
      bytes_given_ += moves_->begin(index_, device_.up, device_.down);
      go_on(Stage::begin, Stage::copy);
      return Progress::did;
    case Stage::copy:
      return look();
    case Stage::assign:
      return Progress::waits;
    case Stage::hide:
      publish(Stage::hide, Stage::fill_slot);
      return Progress::did;
    case Stage::fill_slot:
      moves_->fill_slot(index_, device_.computing);
      go_on(Stage::fill_slot, Stage::show);
      return Progress::did;
    case Stage::show:
      publish(Stage::show, Stage::ended);
      return Progress::did;
    case Stage::ended:
      break;
  }
  return Progress::ended;
}

void ExchangeTurn::enter(Stage stage) { stage_.store(stage, std::memory_order_release); }

// After a move's piece: the next one's, or another stage.
void ExchangeTurn::go_on(Stage now, Stage then) {
  const bool is_last = ++index_ == moves_->count();
  if (is_last) index_ = 0;
  enter(!is_last ? now : moves_->any_lives() ? then : Stage::ended);
}

Meanwhile::Progress ExchangeTurn::look() {
  for (void* stream : {device_.up, device_.down}) {
    const int state = device_.query(stream);
    if (state == kNotReady) return Progress::waits;
    if (state != 0) {
      moves_->lose("a copy between CPU and GPU failed with " + cuda_error(state));
      enter(Stage::ended);
      return Progress::did;
    }
  }
  enter(Stage::assign);
  return Progress::did;
}

// The slots of leaving experts are theirs no longer, and later those of the coming ones.
void ExchangeTurn::publish(Stage now, Stage then) {
  const int error = device_.copy(device_.table, device_.image, size_t(device_.table_bytes), device_.computing);
  if (error == 0) {
    enter(then);
    return;
  }
  const std::string why = "the GPU's tables could not be changed: " + cuda_error(error);
  now == Stage::hide ? moves_->undo(why) : moves_->strand(why);
  enter(Stage::ended);
}

bool ExchangeTurn::run(double seconds) {
  const auto start = Clock::now();
  while (piece_of_step() == Progress::did || piece() == Progress::did)
    if (since(start) > seconds) break;
  const bool has_ended = stage_.load(std::memory_order_acquire) == Stage::ended;
  if (has_ended && !forgotten_) {
    moves_->forget();
    forgotten_ = true;
  }
  return has_ended;
}

}  // namespace tandem
