#include "runtime/memory.h"

#include <linux/mempolicy.h>
#include <malloc.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <utility>

#include "runtime/files/readable_file.h"

namespace tandem {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr uintptr_t kSmallPage = 4096;

std::atomic<int64_t> total{0};

const uint8_t* page_of(const uint8_t* data) {
  return reinterpret_cast<const uint8_t*>(reinterpret_cast<uintptr_t>(data) & ~(kSmallPage - 1));
}

}  // namespace

HugeBuffer::HugeBuffer(size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  // Small buffers need no alignment to a huge page, which would cost them 2 MiB of address space each.
  const bool huge = bytes >= kHugePage / 2;
  mapped_ = huge ? bytes + kHugePage : bytes;
  mapping_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    throw std::bad_alloc();
  }
  total += int64_t(bytes);
  const uintptr_t start = reinterpret_cast<uintptr_t>(mapping_);
  data_ = reinterpret_cast<uint8_t*>(huge ? (start + kHugePage - 1) & ~(kHugePage - 1) : start);
  if (huge) madvise(data_, bytes, MADV_HUGEPAGE);  // a wish: refused, the pages are small
}

int64_t HugeBuffer::parts(const uint8_t* begin, const uint8_t* end) {
  const uintptr_t first = reinterpret_cast<uintptr_t>(begin) / kHugePage;
  return end > begin ? int64_t((reinterpret_cast<uintptr_t>(end) - 1) / kHugePage - first + 1) : 0;
}

HugeBuffer::Part HugeBuffer::part(uint8_t* begin, uint8_t* end, int64_t index) {
  const uintptr_t first = reinterpret_cast<uintptr_t>(begin) / kHugePage + uintptr_t(index);
  return {std::max(begin, reinterpret_cast<uint8_t*>(first * kHugePage)),
          std::min(end, reinterpret_cast<uint8_t*>((first + 1) * kHugePage))};
}

void HugeBuffer::Part::touch() const {
  if (begin < end) __atomic_fetch_or(begin, 0, __ATOMIC_RELAXED);
}

void HugeBuffer::prefer_node(uint8_t* begin, uint8_t* end, int node) {
  const uintptr_t first = (reinterpret_cast<uintptr_t>(begin) + kSmallPage - 1) & ~(kSmallPage - 1);
  const uintptr_t last = reinterpret_cast<uintptr_t>(end) & ~(kSmallPage - 1);
  if (first >= last || node < 0 || node >= 64) return;
  const unsigned long nodes = 1ul << node;
  // The kernel reads one bit less than it is told. What it answers does not matter: without the policy, pages come
  // from the node of whoever touches them first, and that is one of the node's workers.
  syscall(SYS_mbind, first, last - first, MPOL_PREFERRED, &nodes, sizeof nodes * 8 + 1, 0);
}

HugeBuffer::~HugeBuffer() {
  if (!mapping_) return;
  munmap(mapping_, mapped_);
  total -= int64_t(bytes_);
}

int64_t HugeBuffer::total_bytes() { return total; }

HugeBuffer::HugeBuffer(HugeBuffer&& other) noexcept { *this = std::move(other); }

HugeBuffer& HugeBuffer::operator=(HugeBuffer&& other) noexcept {
  std::swap(mapping_, other.mapping_);
  std::swap(mapped_, other.mapped_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

int64_t heap_bytes() {
#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 33)
  const struct mallinfo2 info = mallinfo2();
  return int64_t(info.uordblks + info.hblkhd);
#else
  return 0;
#endif
}

void return_free_memory() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

void map_for_reading(const uint8_t* data, int64_t bytes) {
  if (bytes <= 0) return;
  uint8_t end;
  ReadableFile::read(data + bytes - 1, 1, &end);
  const uint8_t* const last = page_of(data + bytes - 1);
  for (const uint8_t* page = page_of(data); page <= last; page += kSmallPage)
    (void)*static_cast<const volatile uint8_t*>(page);
}

}  // namespace tandem
