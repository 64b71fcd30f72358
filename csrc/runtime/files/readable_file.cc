#include "runtime/files/readable_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <system_error>

namespace tandem {
namespace {

struct Place {
  size_t bytes;
  int fd;
};

// By where they begin; mappings do not overlap. Never destroyed: threads may still pack when the process ends.
std::map<uintptr_t, Place>& known() {
  static auto* files = new std::map<uintptr_t, Place>;
  return *files;
}

std::shared_mutex& guard() {
  static auto* mutex = new std::shared_mutex;
  return *mutex;
}

std::string system_message(int error) { return std::generic_category().message(error); }

}  // namespace

ReadableFile::ReadableFile(int fd, const uint8_t* begin, size_t bytes)
    : begin_(begin), bytes_(bytes), fd_(fcntl(fd, F_DUPFD_CLOEXEC, 0)) {
  if (fd_ < 0) return;
  const std::unique_lock lock(guard());
  known()[reinterpret_cast<uintptr_t>(begin_)] = {bytes_, fd_};
}

ReadableFile::~ReadableFile() {
  if (fd_ < 0) return;
  {
    const std::unique_lock lock(guard());
    const auto own = known().find(reinterpret_cast<uintptr_t>(begin_));
    if (own != known().end() && own->second.fd == fd_) known().erase(own);
  }
  close(fd_);
}

bool ReadableFile::read(const uint8_t* from, int64_t bytes, uint8_t* to) {
  const std::shared_lock lock(guard());  // the file stays open meanwhile
  const uintptr_t first = reinterpret_cast<uintptr_t>(from);
  auto next = known().upper_bound(first);
  if (next == known().begin()) return false;
  const auto& [begin, place] = *std::prev(next);
  if (first - begin > place.bytes || size_t(bytes) > place.bytes - (first - begin)) return false;
  for (int64_t done = 0; done < bytes;) {
    const ssize_t got = pread(place.fd, to + done, size_t(bytes - done), off_t(first - begin + uintptr_t(done)));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw UnreadableFile("a file of the checkpoint cannot be read: " + system_message(errno));
    if (got == 0) throw UnreadableFile("a file of the checkpoint became shorter while it was read: copy it again");
    done += got;
  }
  return true;
}

}  // namespace tandem
