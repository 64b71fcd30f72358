// The GPU's end of the hand-off; mailbox_words.h names the words, csrc/experts/handoff/mailbox.h draws the memory.
enum { COUNT = 0, BROKEN = 1 };  // of `state`, in GPU memory

// One block. x is copied in units of 16 bytes. Experts that have a slot on the GPU are left out. rows: how many of the
// tokens are real, in GPU memory; null: all. The others only fill the graph up and are not posted.
//
// A step waits for this kernel, and each load takes half a microsecond. So a thread loads its first unit, its first
// pair, the numbers of rows and of posts together, and looks at none of them before.
extern "C" __global__ void post(u32* header, u32* state, const uint4* x, const int* ids, const int* slots,
                                const float* weights, uint4* mail_x, int* mail_ids, float* mail_weights,
                                const int* rows, int tokens, int row_units, int top_k, int layer, int flags) {
  const int first = threadIdx.x, step = blockDim.x, most_units = tokens * row_units, most_pairs = tokens * top_k;
  const bool has_unit = first < most_units, has_pair = first < most_pairs;
  const uint4 unit = has_unit ? x[first] : make_uint4(0, 0, 0, 0);
  const int slot = has_pair ? slots[first] : 0, id = has_pair ? ids[first] : 0;
  const float weight = has_pair ? weights[first] : 0.0f;
  const u32 number = state[COUNT] + 1;
  const int count = rows ? *rows : tokens;
  const int units = count * row_units, pairs = count * top_k;
  if (first < units) mail_x[first] = unit;
  if (first < pairs) {
    mail_ids[first] = slot >= 0 ? -1 : id;
    mail_weights[first] = weight;
  }
  for (int i = first + step; i < units; i += step) mail_x[i] = x[i];
  for (int i = first + step; i < pairs; i += step) {
    mail_ids[i] = slots[i] >= 0 ? -1 : ids[i];
    mail_weights[i] = weights[i];
  }
  if (threadIdx.x == 0) {
    header[kLayer] = layer;
    header[kTokens] = count;
    header[kFlags] = flags;
  }
  __threadfence_system();
  __syncthreads();  // after it: every thread has read the old number of posts
  if (threadIdx.x == 0) {
    state[COUNT] = number;
    write_word(header + kPosted, number);
  }
}

// One block, between a post and its `collect`: what the next post will probably ask for; every token's `each` experts,
// best first, as all tokens' best, all tokens' second best, ...
extern "C" __global__ void hint(u32* header, const u32* state, const int* ids, const int* slots, int* mail_hints,
                                int pairs, int each, int layer) {
  for (int i = threadIdx.x; i < pairs; i += blockDim.x)
    mail_hints[i % each * (pairs / each) + i / each] = slots[i] >= 0 ? -1 : ids[i];
  if (threadIdx.x == 0) {
    header[kHintLayer] = layer;
    header[kHintIds] = pairs;
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) write_word(header + kHinted, state[COUNT]);
}

// Every block waits for the answer and copies its part. After a failure nobody waits again, and the result is NaN. Rows
// that only fill the graph up (see `post`) are copies of the last real one, and so is their result.
extern "C" __global__ void collect(u32* header, u32* state, const float4* mail_result, float4* out, const int* rows,
                                   int tokens, int row_units, u64 patience) {
  __shared__ int answered;
  const int count = rows ? *rows : tokens;
  if (threadIdx.x == 0) {
    const u32 number = state[COUNT];
    const u64 start = nanoseconds();
    answered = 0;
    for (u32 polls = 1; !answered && !*(volatile u32*)(state + BROKEN); ++polls) {
      answered = read_word(header + kDone) == number;
      const int gone = polls % 16 == 0 && (read_word(header + kFailed) || nanoseconds() - start > patience);
      if (!answered && gone) {
        *(volatile u32*)(state + BROKEN) = 1;
        write_word(header + kGaveUp, 1);
      }
    }
  }
  __syncthreads();
  const float nan = __int_as_float(0x7fc00000);
  const int real = count * row_units, units = tokens * row_units;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < units; i += gridDim.x * blockDim.x) {
    const int from = i < real ? i : real - row_units + i % row_units;
    out[i] = answered ? __ldcv(mail_result + from) : make_float4(nan, nan, nan, nan);
  }
}
