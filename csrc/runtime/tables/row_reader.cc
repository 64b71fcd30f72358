#include "runtime/tables/row_reader.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "runtime/files/readable_file.h"

namespace tandem {
namespace {

constexpr int64_t kFew = 2048;             // rows that one thread copies
constexpr int64_t kMostStep = 64;          // rows that a thread reads before it looks for others
constexpr int64_t kPrefetched = 16;        // rows of memory under way at a time
constexpr int64_t kLine = 64;              // bytes
constexpr int64_t kAheadBytes = 64 << 20;  // of rows that were read ahead

}  // namespace

RowReader::RowReader(std::string name, const uint8_t* rows, int64_t count, int64_t row_bytes, int threads)
    : name_(std::move(name)),
      rows_(rows),
      count_(count),
      row_bytes_(row_bytes),
      ahead_(kAheadBytes),
      threads_(threads) {}

RowReader::RowReader(std::unique_ptr<RowFiles> files, int threads)
    : name_(files->name()),
      count_(files->rows()),
      row_bytes_(files->row_bytes()),
      files_(std::move(files)),
      ahead_(kAheadBytes),
      threads_(threads) {}

bool RowReader::copy_few(const int64_t* numbers, int64_t count, uint8_t* out) {
  if (count > kFew || (files_ && files_->direct())) return false;
  check(numbers, count);
  if (rows_) {
    copy(numbers, 0, count, out);
    return true;
  }
  for (int64_t i = 0; i < count; ++i)
    if (!files_->read_cached(numbers[i], out + i * row_bytes_)) return false;
  return true;
}

void RowReader::read(const int64_t* numbers, int64_t count, uint8_t* out) {
  if (copy_few(numbers, count, out)) return;
  check(numbers, count);
  if (rows_) {
    threads_.run(count, step_of(count), [&](int64_t first, int64_t last) { copy(numbers, first, last, out); });
    return;
  }
  const std::vector<int64_t> missing = missing_of(numbers, count, out);
  waited_ += int64_t(missing.size());
  read_missing(numbers, missing, out);
  ahead_.tidy();
}

void RowReader::read_missing(const int64_t* numbers, const std::vector<int64_t>& missing, uint8_t* out) {
  const int64_t count = int64_t(missing.size());
  threads_.run(count, step_of(count), [&](int64_t first, int64_t last) {
    for (int64_t m = first; m < last; ++m) {
      const int64_t i = missing[size_t(m)];
      files_->read(numbers[i], out + i * row_bytes_);
    }
  });
}

std::vector<int64_t> RowReader::missing_of(const int64_t* numbers, int64_t count, uint8_t* out) {
  std::vector<uint8_t> there(size_t(count), 0);
  const RowsAhead::Groups groups = ahead_.groups();
  const auto look = [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      uint8_t* to = out + i * row_bytes_;
      there[size_t(i)] =
          files_->direct() ? std::any_of(groups.begin(), groups.end(), [&](auto& g) { return g->take(numbers[i], to); })
                           : files_->read_cached(numbers[i], to);
    }
  };
  if (!files_->direct() || !groups.empty()) {
    if (count <= kFew)
      look(0, count);
    else
      threads_.run(count, step_of(count), look);
  }
  std::vector<int64_t> missing;
  for (int64_t i = 0; i < count; ++i)
    if (!there[size_t(i)]) missing.push_back(i);
  return missing;
}

void RowReader::read_ahead(const int64_t* numbers, int64_t count) {
  if (rows_ || !count) return;
  check(numbers, count);
  std::vector<int64_t> own(numbers, numbers + count);
  if (count <= kFew)
    begin_ahead(std::move(own));
  else  // sorting them takes milliseconds
    threads_.queue(1, 1, [this, own = std::move(own)](int64_t, int64_t) { begin_ahead(own); });
}

void RowReader::begin_ahead(std::vector<int64_t> numbers) {
  std::sort(numbers.begin(), numbers.end());
  numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
  const int64_t rows = int64_t(numbers.size());
  if (!files_->direct()) {
    threads_.queue(rows, step_of(rows), [this, own = std::move(numbers)](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) read_ahead_ += files_->fetch(own[size_t(i)]);
    });
  } else if (const auto group = ahead_.add(std::move(numbers), row_bytes_)) {
    threads_.queue(rows, step_of(rows), [this, group](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) read_ahead_ += group->read(*files_, i);
    });
  }
}

void RowReader::check(const int64_t* numbers, int64_t count) const {
  for (int64_t i = 0; i < count; ++i)
    if (numbers[i] < 0 || numbers[i] >= count_)
      throw UnreadableFile(name_ + " has " + std::to_string(count_) + " rows, and one beyond them was asked for");
}

void RowReader::copy(const int64_t* numbers, int64_t first, int64_t last, uint8_t* out) const {
  const auto prefetch = [&](int64_t i) {
    const uint8_t* row = rows_ + numbers[i] * row_bytes_;
    for (int64_t at = 0; at < row_bytes_; at += kLine) __builtin_prefetch(row + at);
  };
  for (int64_t i = first; i < std::min(last, first + kPrefetched); ++i) prefetch(i);
  for (int64_t i = first; i < last; ++i) {
    if (i + kPrefetched < last) prefetch(i + kPrefetched);
    std::memcpy(out + i * row_bytes_, rows_ + numbers[i] * row_bytes_, size_t(row_bytes_));
  }
}

int64_t RowReader::step_of(int64_t count) const {
  return std::clamp<int64_t>(count / (8 * threads_.count()), 1, kMostStep);
}

}  // namespace tandem
