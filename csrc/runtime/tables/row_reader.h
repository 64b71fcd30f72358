// Rows of a table by their numbers: out of memory, out of files through the page cache, or past it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "runtime/tables/reading_threads.h"
#include "runtime/tables/row_files.h"
#include "runtime/tables/rows_ahead.h"

namespace tandem {

class RowReader {
 public:
  // Of a table in memory, which stays the caller's. name: for messages.
  RowReader(std::string name, const uint8_t* rows, int64_t count, int64_t row_bytes, int threads);
  // Of a table in files.
  RowReader(std::unique_ptr<RowFiles> files, int threads);

  int64_t row_bytes() const { return row_bytes_; }

  // Rows that are at hand, few enough to be copied by the calling thread: true. False: others have to be read.
  bool copy_few(const int64_t* numbers, int64_t count, uint8_t* out);

  // Rows `numbers` to `out`, [count, row_bytes]. Throws UnreadableFile naming the file where one cannot be read, or
  // the table where it has no such row.
  void read(const int64_t* numbers, int64_t count, uint8_t* out);

  // These rows will be needed soon: threads read them meanwhile, into memory or into the page cache.
  void read_ahead(const int64_t* numbers, int64_t count);

  // Rows that `read` had to wait for, since the start.
  int64_t waited() const { return waited_; }
  // Rows that were read before anybody needed them.
  int64_t ahead() const { return read_ahead_; }

 private:
  void begin_ahead(std::vector<int64_t> numbers);
  void check(const int64_t* numbers, int64_t count) const;
  void copy(const int64_t* numbers, int64_t first, int64_t last, uint8_t* out) const;
  void read_missing(const int64_t* numbers, const std::vector<int64_t>& missing, uint8_t* out);
  std::vector<int64_t> missing_of(const int64_t* numbers, int64_t count, uint8_t* out);
  int64_t step_of(int64_t count) const;

  const std::string name_;
  const uint8_t* rows_ = nullptr;  // null: in files
  const int64_t count_, row_bytes_;
  const std::unique_ptr<RowFiles> files_;
  RowsAhead ahead_;
  std::atomic<int64_t> waited_{0}, read_ahead_{0};
  ReadingThreads threads_;  // last: they end first
};

}  // namespace tandem
