// Files whose bytes somebody has mapped, so that packing can read them as a file, into a buffer that stays in the
// cache. Touching the mapping costs a page fault for every 64 KB, and letting go of the pages later as much again. And
// a file that was cut short meanwhile is an error here, not a SIGBUS.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>

namespace tandem {

// The file ended early, or the disk failed.
struct UnreadableFile : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// While this lives, addresses [begin, begin + bytes) are known to be the first bytes of a file.
class ReadableFile {
 public:
  // `fd` is duplicated. Where that cannot be (too many open files), the mapping is all there is: read() is false.
  ReadableFile(int fd, const uint8_t* begin, size_t bytes);
  ~ReadableFile();
  ReadableFile(const ReadableFile&) = delete;
  ReadableFile& operator=(const ReadableFile&) = delete;

  // Reads `bytes` that are mapped at `from` out of their file. False, and nothing is done, where no known file is
  // mapped there. Throws UnreadableFile.
  static bool read(const uint8_t* from, int64_t bytes, uint8_t* to);

 private:
  const uint8_t* begin_;
  size_t bytes_;
  int fd_;
};

}  // namespace tandem
