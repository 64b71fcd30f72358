// Rows to lanes: the reordering that packing mostly is. Sixteen rows of units become units of sixteen lanes.
#pragma once

#include <cstdint>

namespace tandem {

// out[u * 16 + r] = row r's unit u, for units [0, units) of 32 (or 16) bits. Row r begins at rows + r * stride bytes;
// rows from `count` on, up to 16, are zeros. Any alignment of `rows`; `out` is aligned to 16 bytes.
void interleave32(const uint8_t* rows, int64_t stride, int64_t count, int64_t units, uint8_t* out);
void interleave16(const uint8_t* rows, int64_t stride, int64_t count, int64_t units, uint8_t* out);

// As interleave32, of rows of 4-bit codes, 8 to a unit (even ones in low halves). The even codes of a unit go to the
// low 16 bits, in order; the odd ones go to the high.
void interleave_nibbles(const uint8_t* rows, int64_t stride, int64_t count, int64_t units, uint8_t* out);

// Codes that lie as lanes already, [k][16] of one byte each, to a panel's pairs of k (int8), or to its blocks of 8 k
// (int4): see Format. `count` of k, a multiple of 8.
void join_bytes(const int8_t* lanes, int64_t count, uint8_t* out);
void join_nibbles(const int8_t* lanes, int64_t count, uint8_t* out);

// Rows of 6-bit codes, one a byte, to blocks of 192 bytes for 16 k, [0, blocks): see Format::int6.
void interleave_sixes(const uint8_t* rows, int64_t stride, int64_t count, int64_t blocks, uint8_t* out);
// Of 2 and 3 bits, likewise: blocks of 64 and 96 bytes.
void interleave_twos(const uint8_t* rows, int64_t stride, int64_t count, int64_t blocks, uint8_t* out);
void interleave_threes(const uint8_t* rows, int64_t stride, int64_t count, int64_t blocks, uint8_t* out);

}  // namespace tandem
