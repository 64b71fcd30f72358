// Matrix tiles in plain C++ with AMX's geometry (16 rows of 64 bytes), so that packing and blocking can be tested where
// there is no AMX.
#pragma once

#include <stdint.h>

#include "isa/inline.h"
#include "isa/tiles.h"

namespace tandem {
namespace {

struct PortableTiles {
  static void begin(int) {}
  static void end() {}

  struct Sums {
    float v[5][16][32];
  };
  template <int kRowTiles, int kPanels>
  static void clear(Sums& sums) {
    sums = {};
  }
  template <int kRowTiles, int kPanels, class Feed>
  static void step(Sums& sums, int high, const uint8_t* a, const uint8_t* b0, const uint8_t* b1, Feed& feed) {
    const uint16_t* const b[2] = {reinterpret_cast<const uint16_t*>(b0), reinterpret_cast<const uint16_t*>(b1)};
    for (int t = 0; t < kRowTiles; ++t)
      for (int r = 0; r < high; ++r) {
        const uint16_t* x = reinterpret_cast<const uint16_t*>(a + (t * high + r) * 64);
        for (int column = 0; column < 16 * kPanels; ++column)
          for (int k = 0; k < 32; ++k)
            sums.v[t][r][column] +=
                float_of_bf16(x[k]) * float_of_bf16(b[column / 16][k / 2 * 32 + column % 16 * 2 + k % 2]);
      }
    all_quarters(feed);
  }
  // Inlined where it is called it would be compiled ten times for a format.
  template <class Feed>
  __attribute__((noinline)) static void all_quarters(Feed& feed) {
    feed.template quarter<0>();
    feed.template quarter<1>();
    feed.template quarter<2>();
    feed.template quarter<3>();
  }
  template <int kRowTiles, int kPanels>
  static void store(const Sums& sums, int high, float* y, int64_t y_stride) {
    for (int t = 0; t < kRowTiles; ++t)
      for (int r = 0; r < high; ++r)
        for (int column = 0; column < 16 * kPanels; ++column)
          y[(t * high + r) * y_stride + column] = sums.v[t][r][column];
  }

  static constexpr int64_t kPeakSteps = 4, kPeakBytes = 4096 * kPeakSteps;
  static void multiply_in_cache(const uint8_t* operands, int64_t rounds) {
    float sums[32 * 32] = {};
    const uint8_t* const panels[2] = {operands + 2048 * kPeakSteps, operands + 3072 * kPeakSteps};
    for (int64_t i = 0; i < rounds; ++i) {
      multiply<2>(16, {operands, 64, 2048}, panels, kPeakSteps, sums, 32, true, [] {});
      __asm__ volatile("" : : "r"(sums) : "memory");
    }
  }

  template <int kRowTiles, class Between>
  static void multiply(int high, const TileRows& a, const uint8_t* const* b, int64_t steps, float* y, int64_t y_stride,
                       bool onto, const Between& between) {
    for (int r = 0; r < high * kRowTiles; ++r)
      for (int column = 0; column < 32; ++column) {
        float* sum = y + r * y_stride + column;
        if (!onto) *sum = 0.0f;
        const uint16_t* w = reinterpret_cast<const uint16_t*>(b[column / 16]) + column % 16 * 2;
        for (int64_t pair = 0; pair < 16 * steps; ++pair) {
          const uint8_t* row = a.at + pair / 16 * a.step + r * a.apart;
          const uint16_t* x = reinterpret_cast<const uint16_t*>(row) + pair % 16 * 2;
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
};

}  // namespace
}  // namespace tandem
