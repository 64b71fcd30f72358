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
  switch (stage_) {
    case Stage::begin:
      bytes_given_ += moves_->begin(index_, device_.up, device_.down);
      go_on(Stage::travel);
      return Progress::did;
    case Stage::travel:
      return look();
    case Stage::settle:
      moves_->settle(index_);
      go_on(Stage::hide);
      return Progress::did;
    case Stage::hide:
      publish(Stage::place);
      return Progress::did;
    case Stage::place:
      moves_->place(index_, device_.computing);
      go_on(Stage::show);
      return Progress::did;
    case Stage::show:
      publish(Stage::ended);
      return Progress::did;
    case Stage::ended:
      break;
  }
  return Progress::ended;
}

// After a move's piece: the next one's, or another stage.
void ExchangeTurn::go_on(Stage then) {
  if (++index_ < moves_->count()) return;
  index_ = 0;
  stage_ = moves_->any_lives() ? then : Stage::ended;
}

Meanwhile::Progress ExchangeTurn::look() {
  for (void* stream : {device_.up, device_.down}) {
    const int state = device_.query(stream);
    if (state == kNotReady) return Progress::waits;
    if (state != 0) {
      moves_->lose("a copy between CPU and GPU failed with " + cuda_error(state));
      stage_ = Stage::ended;
      return Progress::did;
    }
  }
  stage_ = Stage::settle;
  return Progress::did;
}

// The slots of leaving experts are theirs no longer, and later those of the coming ones.
void ExchangeTurn::publish(Stage then) {
  const int error = device_.copy(device_.table, device_.image, size_t(device_.table_bytes), device_.computing);
  if (error == 0) {
    stage_ = then;
    return;
  }
  const std::string why = "the GPU's tables could not be changed: " + cuda_error(error);
  stage_ == Stage::hide ? moves_->undo(why) : moves_->strand(why);
  stage_ = Stage::ended;
}

bool ExchangeTurn::run(double seconds) {
  const auto start = Clock::now();
  while (piece() == Progress::did)
    if (since(start) > seconds) break;
  if (stage_ == Stage::ended && !forgotten_) {
    moves_->forget();
    forgotten_ = true;
  }
  return stage_ == Stage::ended;
}

}  // namespace tandem
