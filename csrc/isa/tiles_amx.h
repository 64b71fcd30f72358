// Matrix tiles in hardware (AMX-TILE, AMX-BF16). Tile numbers must be literals, so the whole 2 x 2 block is here.
//
// A tile is zeroed after its last use, which gives its physical register back. A core whose other hyperthread is busy
// has hardly one register more than tiles. With all eight in use, each product would wait for the one before. Figures:
// docs/lab/kernel-choices.md.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "isa/inline.h"
#include "isa/tiles.h"

namespace tandem {
namespace {

struct AmxTiles {
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  struct Configs {
    Config of[16 + 1];
  };
  // Tiles of sums and of activations have as many rows as are needed; products of fewer rows may take less time.
  static constexpr Configs configs() {
    Configs all{};
    for (int high = 1; high <= 16; ++high)
      for (int tile = 0; tile < 6; ++tile) all.of[high].rows[tile] = uint8_t(high);
    return all;
  }

  // Tiles of sums and activations are `high`. Tiles are a worker's own state; released again, so that context switches
  // need not save 8 KiB.
  static void begin(int high) {
    static constexpr Configs kConfigs = configs();
    _tile_loadconfig(&kConfigs.of[high]);
  }
  static void end() { _tile_release(); }

  // Sums of kRowTiles * high rows x 16 * kPanels columns, at most 5 tiles (0 to 4), step after step of 32 k. a: `high`
  // rows of each tile; b0 and b1: 16 lines of each panel. feed.quarter<0 to 3>(): vector work that runs while the tiles
  // multiply.
  struct Sums {};
  template <int kRowTiles, int kPanels>
  static void clear(Sums&) {
    constexpr int kTiles = kRowTiles * kPanels;
    _tile_zero(0);
    if (kTiles > 1) _tile_zero(1);
    if (kTiles > 2) _tile_zero(2);
    if (kTiles > 3) _tile_zero(3);
    if (kTiles > 4) _tile_zero(4);
  }
  template <int kRowTiles, int kPanels, class Feed>
  TANDEM_INLINE static void step(Sums&, int high, const uint8_t* a, const uint8_t* b0, const uint8_t* b1, Feed& feed) {
    if constexpr (kPanels == 1)
      step_of_panel<kRowTiles>(high, a, b0, feed);
    else
      step_of_pair<kRowTiles>(high, a, b0, b1, feed);
  }
  template <int kRowTiles, class Feed>
  TANDEM_INLINE static void step_of_pair(int high, const uint8_t* a, const uint8_t* b0, const uint8_t* b1, Feed& feed) {
    static_assert(kRowTiles <= 2);
    fence();
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b0, 64);
    _tile_dpbf16ps(0, 4, 6);
    feed.template quarter<0>();
    _tile_loadd(7, b1, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_zero(4);
    feed.template quarter<1>();
    if (kRowTiles == 2) {
      _tile_loadd(5, a + high * 64, 64);
      _tile_dpbf16ps(2, 5, 6);
      feed.template quarter<2>();
      _tile_dpbf16ps(3, 5, 7);
      _tile_zero(5);
    } else {
      feed.template quarter<2>();
    }
    _tile_zero(6);
    _tile_zero(7);
    feed.template quarter<3>();
  }
  template <int kRowTiles, int kPanels>
  static void store(Sums&, int high, float* y, int64_t y_stride) {
    constexpr int kTiles = kRowTiles * kPanels;
    const int64_t y_bytes = 4 * y_stride;
    const auto at = [&](int tile) { return y + tile / kPanels * high * y_stride + tile % kPanels * 16; };
    fence();
    _tile_stored(0, at(0), y_bytes);
    if (kTiles > 1) _tile_stored(1, at(1), y_bytes);
    if (kTiles > 2) _tile_stored(2, at(2), y_bytes);
    if (kTiles > 3) _tile_stored(3, at(3), y_bytes);
    if (kTiles > 4) _tile_stored(4, at(4), y_bytes);
    fence();
  }

  // y[0 : kRowTiles * high, 0 : 32] (+)= a * b over `steps` of 32 k. b[p]: 16 lines per step. `between` is called once
  // a step: vector work that runs while the tiles multiply. Tiles 0 to 3: sums, 4 and 5: rows of a, 6 and 7: panels.
  // Panels should stay in L1 for the next rows, and a block's rows are as large: these are loaded past it.
  template <int kRowTiles, class Between>
  static void multiply(int high, const TileRows& a, const uint8_t* const* b, int64_t steps, float* y, int64_t y_stride,
                       bool onto, const Between& between) {
    fence();
    const int64_t y_bytes = 4 * y_stride;
    float* y1 = y + high * y_stride;
    if (onto) {
      _tile_loadd(0, y, y_bytes);
      _tile_loadd(1, y + 16, y_bytes);
      if (kRowTiles == 2) {
        _tile_loadd(2, y1, y_bytes);
        _tile_loadd(3, y1 + 16, y_bytes);
      }
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t s = 0; s < steps; ++s) {
      const uint8_t* rows = a.at + s * a.step;
      _tile_stream_loadd(4, rows, a.apart);
      _tile_loadd(6, b[0] + 1024 * s, 64);
      _tile_dpbf16ps(0, 4, 6);
      if (kRowTiles == 1) _tile_zero(6);
      _tile_loadd(7, b[1] + 1024 * s, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_zero(4);
      if (kRowTiles == 2) {
        _tile_stream_loadd(5, rows + high * a.apart, a.apart);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        _tile_zero(5);
        _tile_zero(6);
      }
      _tile_zero(7);
      between();
    }
    fence();
    _tile_stored(0, y, y_bytes);
    _tile_stored(1, y + 16, y_bytes);
    if (kRowTiles == 2) {
      _tile_stored(2, y1, y_bytes);
      _tile_stored(3, y1 + 16, y_bytes);
      _tile_zero(2);
      _tile_zero(3);
    }
    _tile_zero(0);
    _tile_zero(1);
    fence();
  }

  // y[0 : rows, 0 : 16] = a * b over kSteps of 32 k; in both `a` and y a row takes 64 bytes.
  template <int kSteps>
  TANDEM_INLINE static void multiply_group(int rows, const uint8_t* a, const uint8_t* b, float* y) {
    fence();
    _tile_zero(0);
#pragma GCC unroll 4
    for (int s = 0; s < kSteps; ++s) {
      _tile_loadd(4, a + s * rows * 64, 64);
      _tile_loadd(6, b + s * 1024, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_zero(4);
      _tile_zero(6);
    }
    _tile_stored(0, y, 64);
    _tile_zero(0);
    fence();
  }

  // 2 x 2 tiles over kPeakSteps of 32 k, again and again; sums stay in their tiles. Operands of 16 KiB stay in L1, even
  // if two hyperthreads share it.
  static constexpr int64_t kPeakSteps = 4, kPeakBytes = 4096 * kPeakSteps;
  static void multiply_in_cache(const uint8_t* operands, int64_t rounds) {
    fence();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < rounds; ++i)
      for (int64_t s = 0; s < kPeakSteps; ++s) {
        const uint8_t* step = operands + 4096 * s;
        _tile_loadd(4, step, 64);
        _tile_loadd(6, step + 2048, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, step + 3072, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_zero(4);
        _tile_loadd(5, step + 1024, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        _tile_zero(5);
        _tile_zero(6);
        _tile_zero(7);
      }
    fence();
  }

 private:
  // 3 to 5 tiles of rows by one panel.
  template <int kRowTiles, class Feed>
  TANDEM_INLINE static void step_of_panel(int high, const uint8_t* a, const uint8_t* b, Feed& feed) {
    static_assert(kRowTiles >= 3 && kRowTiles <= 5);
    const int64_t tile = high * 64;
    fence();
    _tile_loadd(6, b, 64);
    _tile_loadd(5, a, 64);
    _tile_dpbf16ps(0, 5, 6);
    _tile_zero(5);
    feed.template quarter<0>();
    _tile_loadd(5, a + tile, 64);
    _tile_dpbf16ps(1, 5, 6);
    _tile_zero(5);
    feed.template quarter<1>();
    _tile_loadd(5, a + 2 * tile, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_zero(5);
    feed.template quarter<2>();
    if (kRowTiles > 3) {
      _tile_loadd(5, a + 3 * tile, 64);
      _tile_dpbf16ps(3, 5, 6);
      _tile_zero(5);
    }
    if (kRowTiles > 4) {
      _tile_loadd(5, a + 4 * tile, 64);
      _tile_dpbf16ps(4, 5, 6);
      _tile_zero(5);
    }
    _tile_zero(6);
    feed.template quarter<3>();
  }
  // GCC 12's tile intrinsics do not tell the compiler which memory they read and write.
  TANDEM_INLINE static void fence() { __asm__ volatile("" ::: "memory"); }
};

}  // namespace
}  // namespace tandem
