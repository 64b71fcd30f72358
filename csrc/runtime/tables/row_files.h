// Files of a table that is read by row: where each row lies, and how it is read.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace tandem {

// Rows of a table that lie one behind the other in a file, from byte `begin` on.
struct RowRange {
  int64_t file, begin, rows;
};

class RowFiles {
 public:
  struct File {
    std::string path;
    int fd;  // stays the caller's, and open
  };

  // direct: the files were opened for reads past the page cache. name: of the table, for messages.
  RowFiles(std::string name, std::vector<File> files, std::vector<RowRange> ranges, int64_t row_bytes, bool direct);

  int64_t rows() const { return ends_.empty() ? 0 : ends_.back(); }
  int64_t row_bytes() const { return row_bytes_; }
  bool direct() const { return direct_; }
  const std::string& name() const { return name_; }

  // Copies a row that the page cache has. False where it has not, or where the system does not say.
  bool read_cached(int64_t number, uint8_t* to) const;

  // Has the page cache take in a row. Whether it had to be read; also false where it cannot be.
  bool fetch(int64_t number) const;

  // Reads a row. Throws UnreadableFile naming the file.
  void read(int64_t number, uint8_t* to) const;

 private:
  struct Place {
    const File* file;
    int64_t begin;
  };

  Place place_of(int64_t number) const;
  void read_through_cache(const Place& place, uint8_t* to) const;
  void read_direct(const Place& place, uint8_t* to) const;
  [[noreturn]] void fail(const File& file, const std::string& why) const;

  const std::string name_;
  const std::vector<File> files_;
  const std::vector<RowRange> ranges_;
  const int64_t row_bytes_;
  const bool direct_;
  std::vector<int64_t> ends_;  // of each range: the number of rows up to its last
  mutable std::atomic<bool> tells_cached_{true};
};

}  // namespace tandem
