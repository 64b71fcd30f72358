#include "runtime/files/mapped_file.h"

#include <sys/mman.h>

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

namespace tandem {
namespace {
constexpr size_t kHugePage = size_t{2} << 20;
}

MappedFile::MappedFile(int fd, size_t bytes) : reserved_bytes_(bytes + kHugePage), bytes_(bytes) {
  const auto fail = [](const char* what) { throw std::system_error(errno, std::generic_category(), what); };
  reserved_ = mmap(nullptr, reserved_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved_ == MAP_FAILED) fail("reserving addresses");
  const uintptr_t start = (reinterpret_cast<uintptr_t>(reserved_) + kHugePage - 1) & ~(kHugePage - 1);
  void* at = reinterpret_cast<void*>(start);
  if (bytes > 0 && mmap(at, bytes, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    munmap(reserved_, reserved_bytes_);
    fail("mapping the file");
  }
  madvise(at, bytes, MADV_HUGEPAGE);  // a wish: some file systems have large pages in their cache
  data_ = static_cast<const uint8_t*>(at);
  readable_ = std::make_unique<ReadableFile>(fd, data_, bytes);
}

const uint8_t* MappedFile::at(int64_t offset, int64_t length) const {
  constexpr int64_t kLine = 64;
  if (offset < 0 || length < 0 || offset % kLine || offset > int64_t(bytes_) || length > int64_t(bytes_) - offset)
    throw std::invalid_argument("the file of " + std::to_string(bytes_) + " bytes has no " + std::to_string(length) +
                                " bytes at " + std::to_string(offset));
  return data_ + offset;
}

MappedFile::~MappedFile() {
  readable_.reset();  // before the addresses can be somebody else's
  munmap(reserved_, reserved_bytes_);
}

}  // namespace tandem
