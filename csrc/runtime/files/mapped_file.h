// A file mapped read-only, for as long as somebody refers to it: packed weights are used where they lie in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "runtime/files/readable_file.h"

namespace tandem {

class MappedFile {
 public:
  // Maps the first `bytes` of the open file `fd` at a 2 MiB boundary; of `fd` a duplicate is kept, to read what should
  // not be mapped (see ReadableFile). Throws std::system_error.
  MappedFile(int fd, size_t bytes);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const uint8_t* data() const { return data_; }
  size_t bytes() const { return bytes_; }

  // Where [offset, offset + length) lies. Throws std::invalid_argument outside the file or off a cache line.
  const uint8_t* at(int64_t offset, int64_t length) const;

 private:
  void* reserved_ = nullptr;
  size_t reserved_bytes_ = 0;
  const uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
  std::unique_ptr<ReadableFile> readable_;
};

}  // namespace tandem
