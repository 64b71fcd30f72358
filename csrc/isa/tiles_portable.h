// Matrix tiles in plain C++ with AMX's geometry (16 rows of 64 bytes), so that packing and blocking can be tested where
// there is no AMX.
#pragma once

#include <stdint.h>

#include "isa/inline.h"

namespace tandem {
namespace {

struct PortableTiles {
  static void begin(int) {}
  static void end() {}

  static constexpr int64_t kPeakSteps = 4, kPeakBytes = 4096 * kPeakSteps;
  static void multiply_in_cache(const uint8_t* operands, int64_t rounds) {
    float sums[32 * 32] = {};
    const uint8_t* const panels[2] = {operands + 2048 * kPeakSteps, operands + 3072 * kPeakSteps};
    for (int64_t i = 0; i < rounds; ++i) {
      multiply<2>({operands, 64, 2048, 1024}, panels, kPeakSteps, sums, 32, true, [] {});
      __asm__ volatile("" : : "r"(sums) : "memory");
    }
  }

  template <int kRowTiles, class Between>
  static void multiply(const RowBlock& a, const uint8_t* const* b, int64_t steps, float* y, int64_t y_stride, bool onto,
                       const Between& between) {
    for (int r = 0; r < 16 * kRowTiles; ++r)
      for (int column = 0; column < 32; ++column) {
        float* sum = y + r * y_stride + column;
        if (!onto) *sum = 0.0f;
        const uint8_t* row = a.data + r / 16 * a.group + r % 16 * a.stride;
        const uint16_t* w = reinterpret_cast<const uint16_t*>(b[column / 16]) + column % 16 * 2;
        for (int64_t pair = 0; pair < 16 * steps; ++pair) {
          const uint16_t* x = reinterpret_cast<const uint16_t*>(row + pair / 16 * a.step) + pair % 16 * 2;
          for (int i = 0; i < 2; ++i) *sum += float_of_bf16(x[i]) * float_of_bf16(w[32 * pair + i]);
        }
      }
    for (int64_t s = 0; s < steps; ++s) between();
  }

  template <int kSteps>
  static void multiply_group(int rows, const uint8_t* a, const uint8_t* b, float* y) {
    for (int r = 0; r < rows; ++r)
      for (int column = 0; column < 16; ++column) {
        float sum = 0.0f;
        for (int64_t k = 0; k < 32 * kSteps; ++k) {
          const uint16_t* x = reinterpret_cast<const uint16_t*>(a + (k / 32 * rows + r) * 64);
          const uint16_t* w = reinterpret_cast<const uint16_t*>(b + k / 2 * 64) + 2 * column;
          sum += float_of_bf16(x[k % 32]) * float_of_bf16(w[k % 2]);
        }
        y[16 * r + column] = sum;
      }
  }

  template <class Between>
  static void multiply_in_turn(bool, const RowBlock& a, const uint8_t* const* b, int64_t steps, float* y,
                               int64_t y_stride, const Between& between) {
    multiply<1>(a, b, steps, y, y_stride, false, between);
  }
};

}  // namespace
}  // namespace tandem
