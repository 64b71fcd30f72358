// Memory for packed weights and scratch: zeroed, 2 MiB aligned, huge pages where the system has them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tandem {

class HugeBuffer {
 public:
  HugeBuffer() = default;
  explicit HugeBuffer(size_t bytes);  // throws std::bad_alloc
  ~HugeBuffer();
  HugeBuffer(HugeBuffer&& other) noexcept;
  HugeBuffer& operator=(HugeBuffer&& other) noexcept;

  // A part of new memory that one worker fills. Its huge page is cleared when it is touched first, and by one thread
  // alone, as parts are given out here. Threads that touch a page together each clear it, and all but one throw their
  // work away: that would be most of the time of loading. Bytes that are there already stay, since the end of what
  // begins in the part before may be written first. A page fault clears it, not MADV_POPULATE_WRITE, which takes a lock
  // of the whole process.
  struct Part {
    uint8_t *begin, *end;
    void touch() const;
  };

  // The huge pages of [begin, end), cut at its ends.
  static int64_t parts(const uint8_t* begin, const uint8_t* end);
  static Part part(uint8_t* begin, uint8_t* end, int64_t index);

  // Asks for the pages that lie in [begin, end) to come from a memory node (as the system numbers it) when they are
  // first touched. A wish: a node without room, or a system that refuses, gives other memory.
  static void prefer_node(uint8_t* begin, uint8_t* end, int node);

  // Of all that exist, whether they were touched or not.
  static int64_t total_bytes();

  uint8_t* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  void* mapping_ = nullptr;
  size_t mapped_ = 0;
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
};

// Bytes that malloc has given out and that were not freed; 0 where nobody knows.
int64_t heap_bytes();

// What was freed and malloc has kept goes back to the system.
void return_free_memory();

// Makes the pages of memory that is mapped from a file readable without a fault; read from a disk, they are waited for.
// Throws UnreadableFile where the file has become shorter (if it is a ReadableFile: its end is read). Pages are
// touched: faults take a lock of the mapping's own where MADV_POPULATE_READ takes the process's (16 threads, a file in
// memory: 236 GB/s against 63).
void map_for_reading(const uint8_t* data, int64_t bytes);

}  // namespace tandem
