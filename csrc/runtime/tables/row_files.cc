#include "runtime/tables/row_files.h"

#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <system_error>
#include <utility>

#include "runtime/files/readable_file.h"

namespace tandem {
namespace {

constexpr int64_t kBlock = 4096;  // reads past the page cache begin and end at multiples of it
constexpr int kNoWait = 8;        // RWF_NOWAIT
constexpr const char* kCutShort = "it was cut short";

std::string system_message(int error) { return std::generic_category().message(error); }

// As preadv2 with RWF_NOWAIT, which older C libraries lack.
int64_t read_without_waiting(int fd, uint8_t* to, int64_t bytes, int64_t offset) {
#ifdef SYS_preadv2
  const iovec part{to, size_t(bytes)};
  return syscall(SYS_preadv2, fd, &part, 1, long(offset), 0, kNoWait);
#else
  errno = ENOSYS;
  return -1;
#endif
}

// Memory of this thread that begins at a block's border.
uint8_t* blocks_of(int64_t bytes) {
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<uint8_t, Free> memory;
  thread_local int64_t size = 0;
  if (size < bytes) {
    size = 0;
    memory.reset(static_cast<uint8_t*>(std::aligned_alloc(kBlock, size_t(bytes))));
    if (!memory) throw std::bad_alloc();
    size = bytes;
  }
  return memory.get();
}

}  // namespace

RowFiles::RowFiles(std::string name, std::vector<File> files, std::vector<RowRange> ranges, int64_t row_bytes,
                   bool direct)
    : name_(std::move(name)),
      files_(std::move(files)),
      ranges_(std::move(ranges)),
      row_bytes_(row_bytes),
      direct_(direct) {
  int64_t rows = 0;
  for (const RowRange& range : ranges_) ends_.push_back(rows += range.rows);
}

RowFiles::Place RowFiles::place_of(int64_t number) const {
  const size_t i = size_t(std::upper_bound(ends_.begin(), ends_.end(), number) - ends_.begin());
  const RowRange& range = ranges_[i];
  return {&files_[size_t(range.file)], range.begin + (number - (ends_[i] - range.rows)) * row_bytes_};
}

bool RowFiles::read_cached(int64_t number, uint8_t* to) const {
  if (!tells_cached_.load(std::memory_order_relaxed)) return false;
  const Place place = place_of(number);
  const int64_t got = read_without_waiting(place.file->fd, to, row_bytes_, place.begin);
  if (got < 0 && (errno == EOPNOTSUPP || errno == EINVAL || errno == ENOSYS)) tells_cached_ = false;
  return got == row_bytes_;
}

bool RowFiles::fetch(int64_t number) const {
  uint8_t* row = blocks_of((row_bytes_ + kBlock - 1) / kBlock * kBlock);
  if (read_cached(number, row)) return false;
  try {
    read(number, row);
    return true;
  } catch (const UnreadableFile&) {
    return false;
  }
}

void RowFiles::read(int64_t number, uint8_t* to) const {
  const Place place = place_of(number);
  if (direct_)
    read_direct(place, to);
  else
    read_through_cache(place, to);
}

void RowFiles::read_through_cache(const Place& place, uint8_t* to) const {
  for (int64_t done = 0; done < row_bytes_;) {
    const int64_t got = pread(place.file->fd, to + done, size_t(row_bytes_ - done), place.begin + done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail(*place.file, system_message(errno));
    if (got == 0) fail(*place.file, kCutShort);
    done += got;
  }
}

void RowFiles::read_direct(const Place& place, uint8_t* to) const {
  const int64_t first = place.begin / kBlock * kBlock, skipped = place.begin - first;
  const int64_t bytes = (skipped + row_bytes_ + kBlock - 1) / kBlock * kBlock;
  uint8_t* blocks = blocks_of(bytes);
  int64_t got;
  do got = pread(place.file->fd, blocks, size_t(bytes), first);
  while (got < 0 && errno == EINTR);
  if (got < 0) fail(*place.file, system_message(errno));
  if (got < skipped + row_bytes_) fail(*place.file, kCutShort);
  std::memcpy(to, blocks + skipped, size_t(row_bytes_));
}

void RowFiles::fail(const File& file, const std::string& why) const {
  throw UnreadableFile(file.path + ": rows of " + name_ + " cannot be read: " + why);
}

}  // namespace tandem
