#include "runtime/tables/rows_ahead.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "runtime/files/readable_file.h"

namespace tandem {
namespace {

constexpr size_t kMostGroups = 32;  // each row that is needed is looked up in all of them

}  // namespace

RowGroup::RowGroup(std::vector<int64_t> numbers, int64_t row_bytes)
    : numbers_(std::move(numbers)),
      row_bytes_(row_bytes),
      rows_(new uint8_t[size_t(nbytes())]),
      states_(new std::atomic<uint8_t>[numbers_.size()]()),
      unused_(count()) {}

bool RowGroup::read(const RowFiles& files, int64_t i) {
  uint8_t waits = kWaits;
  if (dropped_ || !states_[i].compare_exchange_strong(waits, kBegun)) return false;
  try {
    files.read(numbers_[i], &rows_[i * row_bytes_]);
    states_[i].store(kThere, std::memory_order_release);
    return true;
  } catch (const UnreadableFile&) {
    --unused_;
    return false;
  }
}

bool RowGroup::take(int64_t number, uint8_t* to) {
  const auto at = std::lower_bound(numbers_.begin(), numbers_.end(), number);
  if (at == numbers_.end() || *at != number) return false;
  const int64_t i = at - numbers_.begin();
  uint8_t state = kWaits;
  if (states_[i].compare_exchange_strong(state, kBegun)) {
    --unused_;
    return false;
  }
  if (state == kBegun) return false;
  std::memcpy(to, &rows_[i * row_bytes_], size_t(row_bytes_));
  if (state == kThere && states_[i].compare_exchange_strong(state, kUsed)) --unused_;
  return true;
}

std::shared_ptr<RowGroup> RowsAhead::add(std::vector<int64_t> numbers, int64_t row_bytes) {
  const auto group = std::make_shared<RowGroup>(std::move(numbers), row_bytes);
  if (!group->count() || group->nbytes() > most_bytes_) return nullptr;
  const std::lock_guard lock(mutex_);
  groups_.push_back(group);
  bytes_ += group->nbytes();
  while (bytes_ > most_bytes_ || groups_.size() > kMostGroups) {
    groups_.front()->drop();
    bytes_ -= groups_.front()->nbytes();
    groups_.pop_front();
  }
  return group;
}

RowsAhead::Groups RowsAhead::groups() const {
  const std::lock_guard lock(mutex_);
  return groups_;
}

void RowsAhead::tidy() {
  const std::lock_guard lock(mutex_);
  std::erase_if(groups_, [&](const std::shared_ptr<RowGroup>& group) {
    if (group->used_up()) bytes_ -= group->nbytes();
    return group->used_up();
  });
}

}  // namespace tandem
