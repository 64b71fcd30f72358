// Packed weights of made-up numbers for probes of kernels, and memory for them.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>

#include "format/pack.h"
#include "runtime/files/readable_file.h"

namespace tandem {  // what packing numbers would need
bool ReadableFile::read(const uint8_t*, int64_t, uint8_t*) { abort(); }
}  // namespace tandem

using namespace tandem;

namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;

struct Named {
  const char* name;
  WeightFormat format;
};
const Named kFormats[] = {
    {"bf16", {Format::bf16, 0, ScaleType::f32}},
    {"fp8", {Format::fp8, 128, ScaleType::f32}},
    {"fp8row", {Format::fp8, 0, ScaleType::f32}},
    {"int8", {Format::int8, 32, ScaleType::bf16}},
    {"int8g128", {Format::int8, 128, ScaleType::bf16}},
    {"int8row", {Format::int8, 0, ScaleType::f32}},
    {"int4", {Format::int4, 32, ScaleType::bf16}},
    {"int4g128", {Format::int4, 128, ScaleType::bf16}},
    {"mxfp4", {Format::fp4, 32, ScaleType::e8m0}},
    {"nvfp4", {Format::fp4, 16, ScaleType::e4m3}},
    {"mxfp8", {Format::fp8, 32, ScaleType::e8m0}},
    {"q2_k", {Format::uint2, 16, ScaleType::nibbles16, ShiftType::as_scales}},
    {"q3_k", {Format::int3, 16, ScaleType::bytes16}},
    {"q6_k", {Format::int6, 16, ScaleType::bytes16}},
    {"q4_k", {Format::uint4, 32, ScaleType::bytes8, ShiftType::as_scales}},
};

uint8_t* huge(int64_t bytes) {
  void* p = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const uintptr_t start = (reinterpret_cast<uintptr_t>(p) + kHugePage - 1) & ~uintptr_t(kHugePage - 1);
  madvise(reinterpret_cast<void*>(start), bytes, MADV_HUGEPAGE);
  return reinterpret_cast<uint8_t*>(start);
}

int64_t whole_pages(int64_t bytes) { return (bytes + 4095) / 4096 * 4096; }

// Scales (or shifts) of 2^-11 or so, and halves of bytes or floats of bytes in between.
void fill_scales(const WeightView& w, uint8_t* scales) {
  const int shared = groups_per_half(w.scale_type);
  for (int64_t i = 0; i < (w.group ? 16 * w.padded_depth / w.group : 16); ++i) {
    if (w.scale_type == ScaleType::bf16)
      reinterpret_cast<uint16_t*>(scales)[i] = uint16_t(0x3a00 + (i / 16 * 7 + i) % 128);
    else if (w.scale_type == ScaleType::e8m0)
      scales[i] = uint8_t(116 + i % 8);
    else if (w.scale_type == ScaleType::f32)
      reinterpret_cast<float*>(scales)[i] = 0.0005f;
    else if (w.scale_type == ScaleType::e4m3)
      scales[4 * kPanelRows + i] = uint8_t(0x30 + i % 8), reinterpret_cast<float*>(scales)[i % kPanelRows] = 0.0005f;
    else if (shared) {
      uint8_t* const block = scales + i / (kPanelRows * shared) * kPanelRows * (2 + shared);
      reinterpret_cast<uint16_t*>(block)[i % kPanelRows] = 0x1018;
      block[2 * kPanelRows + i % (kPanelRows * shared)] = uint8_t(20 + i % 40);
    }
  }
}

// Numbers that are none of the format's special ones.
void fill_panel(const WeightView& w, uint8_t* panel) {
  if (w.format == Format::bf16) {
    for (int64_t i = 0; i < w.panel_bytes / 2; ++i) reinterpret_cast<uint16_t*>(panel)[i] = uint16_t(0x3c00 + i % 128);
    return;
  }
  for (int64_t i = 0; i < w.scale_offset; ++i) panel[i] = uint8_t(uint32_t(i) * 2654435761u >> 13);
  if (w.format == Format::fp8)
    for (int64_t i = 0; i < w.scale_offset; ++i) panel[i] &= 0x7e;
  fill_scales(w, panel + w.scale_offset);
  if (w.shift_type == ShiftType::as_scales) fill_scales(w, panel + w.shift_offset);
}

}  // namespace
