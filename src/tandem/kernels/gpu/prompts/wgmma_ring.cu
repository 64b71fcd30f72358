// Blocks of three warpgroups: two multiply (consumers), the third (the producer) brings them rows, codes and scales. An
// item is a tile of rows and kPanels panels. A multiprocessor has one block at a time, which takes items one after the
// other; what is brought runs ahead.
enum {
  kPanels = 8,  // of an item: a warp's are its 16 columns
  kThreads = 128,
  kRowBytes = ROWS * 128,                                         // of a chunk, 64 k
  kCodeBytes = 2 * STEP_BYTES,                                    // of a panel
  kSetChunks = GROUPED && SCALE_STEPS > 2 ? SCALE_STEPS / 2 : 1,  // of one set of scales, or one chunk
  kScaleSets = GROUPED ? (SCALE_STEPS == 1 ? 2 : 1) : 0,
  kScaleBytes = kScaleSets * GROUP_BYTES,
  kStageBytes = (kRowBytes + kPanels * (kCodeBytes + kScaleBytes) + 1023) / 1024 * 1024,
  kChunks = DEPTH / 64,
};

struct Item {
  Tile tile;
  int group;  // of kPanels panels
};

// Where an item's numbers lie.
struct Source {
  const u8 *x, *pool;
  const int* ends;
  int experts, groups;
  u64 stride;
  Matrix m;
};

// Blocks of 16 rows that a tile is multiplied as: each number of them has code of its own.
__device__ inline int blocks_of(int rows) {
  if (rows > 128) return ROWS / 16;
  return rows > 32 && rows <= 48 ? 3 : (rows + 31) / 32 * 2;
}

// An address in shared memory. Without the asm the compiler works it out again for every chunk.
__device__ inline u32 shared_address(const void* p) {
  u32 address = static_cast<u32>(__cvta_generic_to_shared(p));
  asm volatile("" : "+r"(address));
  return address;
}

// Barriers in shared memory: `count` arrivals end a phase.
__device__ inline void make_barrier(u32 b, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(b), "r"(count) : "memory");
}
__device__ inline void arrive(u32 b) {
  asm volatile("{ .reg .b64 s; mbarrier.arrive.shared::cta.b64 s, [%0]; }" : : "r"(b) : "memory");
}
// Once this thread's copies so far have ended.
__device__ inline void arrive_when_copied(u32 b) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" : : "r"(b) : "memory");
}
__device__ inline void wait_phase(u32 b, u32 parity) {
  asm volatile(
      "{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra DONE; bra AGAIN; DONE: }"
      :
      : "r"(b), "r"(parity)
      : "memory");
}
// What has been copied is seen by wgmma. By those who multiply: a thread that copies would wait here for all its
// copies.
__device__ inline void show_to_wgmma() { asm volatile("fence.proxy.async.shared::cta;" : : : "memory"); }

// A ring of STAGES chunks in shared memory, over all items, and where a thread is in it.
struct Ring {
  u32 barriers, memory;  // addresses: of STAGES barriers `full`, then `empty`; of the stages
  u32 stage, parity;
  __device__ inline u32 bytes() const { return memory + stage * kStageBytes; }
  __device__ inline u32 full() const { return barriers + 8 * stage; }
  __device__ inline u32 empty() const { return barriers + 8 * (STAGES + stage); }
  __device__ inline Ring next() const {
    const bool wraps = stage + 1 == STAGES;
    return {barriers, memory, wraps ? 0 : stage + 1, parity ^ wraps};
  }
  __device__ inline void wait_full() const {
    wait_phase(full(), parity);
    show_to_wgmma();
  }
};

__device__ inline Item find_item(const Source& s, int number) {
  return {find_tile(s.ends, s.experts, number / s.groups), number % s.groups};
}

// The panel that warp `slot` of both multiplying groups has: of gate and up that end in the activation, the first group
// has gates and the second the same columns of up.
__device__ inline int panel_of(int group, int slot) {
  return ENDS ? 2 * (4 * group + slot % 4) + slot / 4 : kPanels * group + slot;
}

__device__ inline void copy_unit(u32 to, const u8* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(to), "l"(from) : "memory");
}

enum { kRowUnits = 8, kCodeUnits = kCodeBytes / 16, kScaleUnits = kScaleBytes / 16 };
enum { kRowsApart = kThreads / kRowUnits, kSlotsApart = kThreads / kCodeUnits };  // of one thread's units

// Where a thread of the third group reads its units of an item's chunks.
struct Reader {
  const u8 *rows, *codes, *scales;
  int blocks;  // of 16 rows
  int panels;  // from this thread's first one on
  bool has_scales;
};

__device__ inline Reader reader_of(const Source& s, const Item& item) {
  const int thread = threadIdx.x % kThreads, first = panel_of(item.group, thread / kCodeUnits);
  const u8* expert = s.pool + item.tile.expert * s.stride;
  Reader r = {};
  r.rows = s.x + u64(item.tile.first + thread / kRowUnits) * DEPTH * 2 + thread % kRowUnits * 16;
  r.blocks = blocks_of(item.tile.rows);
  r.panels = s.m.panels - first;
  r.codes = expert + u64(first) * PANEL_BYTES + thread % kCodeUnits * 16;
#if GROUPED
  const int panel = panel_of(item.group, thread / kScaleUnits);
  r.has_scales = thread < kPanels * kScaleUnits && panel < s.m.panels;
  r.scales = expert + u64(panel) * PANEL_BYTES + s.m.scale_at + thread % kScaleUnits * 16;
#endif
  return r;
}

// One chunk of an item into a stage. Rows of 128 bytes in wgmma's swizzle; behind the tile's come others, whose
// products nobody takes. Panels that are not there leave what was there before: their columns neither.
__device__ inline void fetch_chunk(u32 stage, const Reader& r, int chunk) {
  const int thread = threadIdx.x % kThreads, row = thread / kRowUnits, unit = thread % kRowUnits;
  const u8* from = r.rows + 128 * chunk;
  const u32 to = stage + 128 * row + 16 * (unit ^ row % 8);
#pragma unroll
  for (int i = 0; i < ROWS / kRowsApart; ++i) {
    if (i > 1 && (i < 4 || i % 2 == 0) && i >= r.blocks) break;
    copy_unit(to + 128 * kRowsApart * i, from + u64(i) * kRowsApart * DEPTH * 2);
  }
  const u32 codes = stage + kRowBytes + 16 * thread;
#pragma unroll
  for (int i = 0; i < kPanels / kSlotsApart; ++i) {
    const int after = panel_of(0, i * kSlotsApart);
    if (after < r.panels) copy_unit(codes + 16 * kThreads * i, r.codes + chunk * kCodeBytes + after * PANEL_BYTES);
  }
#if GROUPED
  if (r.has_scales)
    copy_unit(stage + kRowBytes + kPanels * kCodeBytes + 16 * thread, r.scales + 2 * chunk / SCALE_STEPS * GROUP_BYTES);
#endif
}

__device__ inline void bring(const Source& s, Ring ring) {
  bool is_first_round = true;
  for (int number = blockIdx.x;; number += gridDim.x) {
    const Item item = find_item(s, number);
    if (item.tile.rows == 0) break;
    const Reader reader = reader_of(s, item);
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (!is_first_round) wait_phase(ring.empty(), ring.parity ^ 1);
      fetch_chunk(ring.bytes(), reader, chunk);
      arrive_when_copied(ring.full());
      ring = ring.next();
      is_first_round = is_first_round && ring.stage != 0;
    }
  }
}
