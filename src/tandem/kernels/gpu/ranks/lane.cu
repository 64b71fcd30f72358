// Sums over the ranks of one host; kRank and kRanks are compiled in (lane.py). Every rank has a receiving memory, which
// the others write: on its GPU, or in CPU memory that all GPUs have mapped. m0 ... are all of them, in the order of
// ranks, as this GPU sees them.
//
// A block owns one stretch of every memory, [2 halves][kRanks] pieces of lines of 16 bytes, and numbers its pieces.
// Piece n lies in half n % 2. Two halves are enough: a rank begins piece n + 2 after it has received piece n + 1 of all
// others, which each of them sent after all of its block had read piece n.
//
// Short messages carry their number in every line (8 bytes of data, twice 4 of number; a store of 8 bytes is never
// torn): a line that shows it has arrived. Long ones are whole lines of data, and a number per piece behind a fence.
//
// A wait is bounded. After one that was not answered no rank waits again, and what is returned is NaN.
enum { kThreads = 512, kEach = 4, kLines = kEach * kThreads, kMostRanks = 8 };
enum { BROKEN = 0, MISSING = 1, PATIENCE = 2 };  // of `state`, words in GPU memory; patience: two of them, nanoseconds
enum Kind { COPY = 0, BF16 = 1, F32 = 2 };

#define MEMORIES uint4 *m0, uint4 *m1, uint4 *m2, uint4 *m3, uint4 *m4, uint4 *m5, uint4 *m6, uint4 *m7
#define OF_RANKS {m0, m1, m2, m3, m4, m5, m6, m7}

__device__ uint4 read_line(const uint4* p) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ void write_line(uint4* p, uint4 v) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};" : : "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w));
}

// Whether to go on waiting for `rank`; looked at now and then. since: 0 at first; reading the clock takes long. `told`
// is in CPU memory.
__device__ __noinline__ bool goes_on(u32* state, u32* told, int rank, u64* since) {
  volatile u32* words = state;
  if (words[BROKEN]) return false;
  const u64 now = nanoseconds(), patience = *(volatile u64*)(state + PATIENCE);
  if (!*since) *since = now;
  if (now - *since <= patience) return true;
  words[MISSING] = rank + 1;
  words[BROKEN] = 1;
  *(volatile u32*)told = rank + 1;
  __threadfence_system();
  return false;
}

// The number after n. Memory begins with zeros, so 0 is none; after 2^32 - 1, which is odd, comes an even one.
__device__ u32 next_number(u32 n) { return n + 1 ? n + 1 : 2; }

// Sums in float32 of words, each two bfloat16 or one float32.
template <int WORDS>
struct Sum {
  float at[2 * WORDS];
  __device__ void begin(const u32* v, int kind) {
    for (int i = 0; i < WORDS; ++i) {
      at[2 * i] = kind == F32 ? __uint_as_float(v[i]) : low_half(v[i]);
      at[2 * i + 1] = kind == F32 ? 0.0f : high_half(v[i]);
    }
  }
  __device__ void add(const u32* v, int kind) {
    for (int i = 0; i < WORDS; ++i) {
      at[2 * i] += kind == F32 ? __uint_as_float(v[i]) : low_half(v[i]);
      at[2 * i + 1] += kind == F32 ? 0.0f : high_half(v[i]);
    }
  }
  __device__ void end(u32* v, int kind) const {
    for (int i = 0; i < WORDS; ++i)
      v[i] = kind == F32 ? __float_as_uint(at[2 * i]) : rounded_pair(at[2 * i], at[2 * i + 1]);
  }
};

// Where unit i goes, of rank 0 where units are gathered: `row` of each rank lie side by side, then comes the next row.
__device__ u64 place_of(u32 i, int kind, u32 row) {
  return i + (kind == COPY ? (u64)(i / row) * (kRanks - 1) * row : 0);
}

// x, out: `units` of 8 bytes, one a thread. COPY: out has all ranks' units, gathered by rows; else their sum, and out
// may be x. counts: pieces of each block so far.
extern "C" __global__ void __launch_bounds__(kThreads)
    short_sum(const uint2* x, uint2* out, MEMORIES, u32* state, u32* counts, u32* told, u32 units, int kind, u32 row) {
  wait_for_previous();
  start_next();
  uint4* const memories[kMostRanks] = OF_RANKS;
  const u32 i = blockIdx.x * kThreads + threadIdx.x;
  const u32 number = next_number(counts[blockIdx.x]);
  const u32 piece = (blockIdx.x * 2 + (number & 1)) * kRanks;
  if (i < units) {
    const uint2 own = x[i];
    const uint4 line = make_uint4(own.x, number, own.y, number);
#pragma unroll
    for (int other = 0; other < kRanks; ++other)
      if (other != kRank) write_line(memories[other] + (piece + kRank) * kThreads + threadIdx.x, line);
    Sum<2> sum;
    const u64 place = place_of(i, kind, row);
    bool whole = true;
#pragma unroll
    for (int from = 0; from < kRanks; ++from) {
      u32 v[2] = {own.x, own.y};
      if (from != kRank) {
        const uint4* at = memories[kRank] + (piece + from) * kThreads + threadIdx.x;
        u64 since = 0;
        uint4 read = read_line(at);
        for (u32 polls = 1; whole && (read.y != number || read.w != number); ++polls) {
          if (polls % 64 == 0) whole = goes_on(state, told, from, &since);
          read = read_line(at);
        }
        v[0] = read.x, v[1] = read.z;
      }
      if (kind == COPY)
        out[place + (u64)from * row] = whole ? make_uint2(v[0], v[1]) : make_uint2(0x7fffffffu, 0x7fffffffu);
      else if (from == 0)
        sum.begin(v, kind);
      else
        sum.add(v, kind);
    }
    u32 v[2] = {0x7fffffffu, 0x7fffffffu};
    if (whole && kind != COPY) sum.end(v, kind);
    if (kind != COPY || !whole) out[place + (kind == COPY ? (u64)kRank * row : 0)] = make_uint2(v[0], v[1]);
  }
  __syncthreads();  // all have read the count
  if (threadIdx.x == 0) counts[blockIdx.x] = number;
}

// The same for many units of 16 bytes, piece after piece. The memories of long messages are others; behind their lines
// lie the numbers of pieces, [block][half][rank]. SCATTER: x has `units` for each rank, and this one sums only its own.
template <bool SCATTER>
__device__ void long_message(const uint4* x, uint4* out, uint4* const* memories, u32* state, u32* counts, u32* told,
                             u64 units, int kind, u32 row, u64 numbers_at) {
  __shared__ int whole;
  wait_for_previous();
  start_next();
  if (SCATTER) out += kRank * units;
  const u64 each = (units + gridDim.x - 1) / gridDim.x, first = each * blockIdx.x;
  const u64 last = first + each < units ? first + each : units;
  u32 number = counts[blockIdx.x];
  if (threadIdx.x == 0) whole = 1;
  for (u64 start = first; start < last; start += kLines) {
    number = next_number(number);
    const u64 piece = (blockIdx.x * 2 + (number & 1)) * kRanks;
    uint4 own[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const u64 i = start + k * kThreads + threadIdx.x;
      if (i < last) own[k] = x[(SCATTER ? kRank * units : 0) + i];
    }
#pragma unroll
    for (int other = 0; other < kRanks; ++other)
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        const u64 i = start + k * kThreads + threadIdx.x;
        if (other != kRank && i < last)
          memories[other][(piece + kRank) * kLines + k * kThreads + threadIdx.x] =
              SCATTER ? x[other * units + i] : own[k];
      }
    __threadfence_system();
    __syncthreads();
#pragma unroll
    for (int other = 0; other < kRanks; ++other)
      if (other != kRank && threadIdx.x == other) {
        write_word((u32*)((char*)memories[other] + numbers_at) + piece + kRank, number);
        const u32* theirs = (const u32*)((char*)memories[kRank] + numbers_at) + piece + other;
        bool waits = true;
        u64 since = 0;
        for (u32 polls = 1; waits && read_word(theirs) != number; ++polls)
          if (polls % 64 == 0) waits = goes_on(state, told, other, &since);
        if (!waits) whole = 0;
      }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const u64 i = start + k * kThreads + threadIdx.x;
      if (i >= last) break;
      const uint4 missing = make_uint4(0x7fffffffu, 0x7fffffffu, 0x7fffffffu, 0x7fffffffu);  // of what did not come
      const u64 place = place_of(i, kind, row);
      Sum<4> sum;
#pragma unroll
      for (int from = 0; from < kRanks; ++from) {
        const uint4* at = memories[kRank] + (piece + from) * kLines + k * kThreads + threadIdx.x;
        const uint4 line = from == kRank ? own[k] : whole ? __ldcv(at) : missing;
        const u32 v[4] = {line.x, line.y, line.z, line.w};
        if (kind == COPY)
          out[place + (u64)from * row] = line;
        else if (from == 0)
          sum.begin(v, kind);
        else
          sum.add(v, kind);
      }
      u32 v[4] = {0x7fffffffu, 0x7fffffffu, 0x7fffffffu, 0x7fffffffu};
      if (whole && kind != COPY) sum.end(v, kind);
      if (kind != COPY || !whole)
        out[place + (kind == COPY ? (u64)kRank * row : 0)] = make_uint4(v[0], v[1], v[2], v[3]);
    }
    __syncthreads();  // all have read the piece
  }
  if (threadIdx.x == 0) counts[blockIdx.x] = number;
}

#define LONG_MESSAGE(name, scatter)                                                                                \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                           \
      name(const uint4* x, uint4* out, MEMORIES, u32* state, u32* counts, u32* told, u64 units, int kind, u32 row, \
           u64 numbers_at) {                                                                                       \
    uint4* const memories[kMostRanks] = OF_RANKS;                                                                  \
    long_message<scatter>(x, out, memories, state, counts, told, units, kind, row, numbers_at);                    \
  }
LONG_MESSAGE(long_sum, false)
LONG_MESSAGE(scatter_sum, true)
