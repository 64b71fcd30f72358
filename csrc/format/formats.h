// Every weight format: its packed layout (abi/weight_view.h) and how one pair of k is decoded into lines of the lane.
// A new format is one more struct here, one more packer, and one more line in micro/table.h.
#pragma once

// Every format but f32, and what decodes it: whoever has something for each lists them by this. Nibbles are listed
// apart, and so are codes of fewer bits, so that units can share the formats out between them.
#define TANDEM_NIBBLE_FORMATS(X) X(int4, Int4Format) X(fp4, Fp4Format) X(uint4, Uint4Format) X(nl4, Nl4Format)
#define TANDEM_OTHER_FORMATS(X) \
  X(bf16, Bf16Format) X(int8, Int8Format) X(fp8, Fp8Format) X(int6, Int6Format) X(bf16_rows, Bf16RowsFormat)
#define TANDEM_SMALL_FORMATS(X) X(uint2, Uint2Format) X(int3, Int3Format)
// Codebooks: no tiles, no integers. Tiers without `HasGridLines` unpack them whatever the number of rows.
#define TANDEM_GRID_FORMATS(X) \
  X(iq2_xxs, Iq2XxsFormat)     \
  X(iq2_xs, Iq2XsFormat) X(iq2_s, Iq2SFormat) X(iq3_xxs, Iq3XxsFormat) X(iq3_s, Iq3SFormat) X(iq1, Iq1Format)
#define TANDEM_FORMATS(X) TANDEM_NIBBLE_FORMATS(X) TANDEM_OTHER_FORMATS(X) TANDEM_SMALL_FORMATS(X)

#include "abi/weight_view.h"
#include "format/grids.h"
#include "isa/inline.h"

namespace tandem {
namespace {

template <class Isa>
struct F32Format {
  using Lane = typename Isa::FloatLane;
  struct Pair {
    typename Lane::Line line[2];
  };
  static constexpr int kPairBytes = 128;    // payload of one panel for one pair of k
  static constexpr int kPairsPerBlock = 1;  // pairs of k that share a block of payload
  static constexpr bool kScaled = false;
  static constexpr bool kPacked = false;  // false: the payload already consists of the lane's lines
  static constexpr float kUnit = 1.0f;    // what a decoded code counts: scales are multiplied by it
  TANDEM_INLINE static Pair decode(const uint8_t* block, int) {
    return {Lane::load_line(block), Lane::load_line(block + 64)};
  }
};

template <class Isa>
struct Bf16Format {
  using Lane = typename Isa::Lane;
  static constexpr int kPairBytes = 64;
  static constexpr int kPairsPerBlock = 1;
  static constexpr bool kScaled = false;
  static constexpr bool kPacked = Lane::kType != DType::bf16;
  static constexpr float kUnit = 1.0f;
  TANDEM_INLINE static auto decode(const uint8_t* block, int) { return Isa::decode_bf16(block); }
};

template <class Isa>
struct Int8Format {
  using Lane = typename Isa::Lane;
  static constexpr int kPairBytes = 32;
  static constexpr int kPairsPerBlock = 1;
  static constexpr bool kScaled = true;
  static constexpr bool kPacked = true;
  static constexpr float kUnit = 1.0f;
  TANDEM_INLINE static auto decode(const uint8_t* block, int) { return Isa::decode_int8(block); }
  // Where the tier has halves (isa/avx512_fp16.h); so below.
  static constexpr auto halves_range() { return Isa::kInt8Range; }
  TANDEM_INLINE static auto halves(const uint8_t* block, int index) { return Isa::halves_int8(block, index); }
};

template <class Isa>
struct Int4Format {
  using Lane = typename Isa::Lane;
  static constexpr int kPairBytes = 16;
  static constexpr int kPairsPerBlock = 4;
  static constexpr bool kScaled = true;
  static constexpr bool kPacked = true;
  static constexpr float kUnit = 1.0f;
  TANDEM_INLINE static auto decode(const uint8_t* block, int index) { return Isa::decode_int4(block, index); }
  static constexpr auto halves_range() { return Isa::kInt4Range; }
  TANDEM_INLINE static auto halves(const uint8_t* block, int index) { return Isa::halves_int4(block, index); }
};

template <class Isa>
struct Uint4Format : Int4Format<Isa> {
  static constexpr bool kShifted = true;  // nearly always: something is added after scaling
  TANDEM_INLINE static auto decode(const uint8_t* block, int index) { return Isa::decode_uint4(block, index); }
  static constexpr auto halves_range() { return Isa::kUint4Range; }
  TANDEM_INLINE static auto halves(const uint8_t* block, int index) { return Isa::halves_uint4(block, index); }
};

template <class Isa>
struct Int6Format : Int4Format<Isa> {
  static constexpr int kPairBytes = 24;
  static constexpr float kUnit = Isa::kInt6Unit;
  static constexpr int kPairsPerBlock = 8;
  TANDEM_INLINE static auto decode(const uint8_t* block, int index) { return Isa::decode_int6(block, index); }
  static constexpr auto halves_range() { return Isa::kInt6Range; }
  TANDEM_INLINE static auto halves(const uint8_t* block, int index) { return Isa::halves_int6(block, index); }
};

template <class Isa>
struct Nl4Format : Int4Format<Isa> {
  static constexpr float kUnit = Isa::kNl4Unit;
  TANDEM_INLINE static auto decode(const uint8_t* block, int index) { return Isa::decode_nl4(block, index); }
  static constexpr auto halves_range() { return Isa::kNl4Range; }
  TANDEM_INLINE static auto halves(const uint8_t* block, int index) { return Isa::halves_nl4(block, index); }
};

template <class Isa>
struct Uint2Format : Int4Format<Isa> {
  static constexpr bool kShifted = true;
  static constexpr int kPairBytes = 8;
  static constexpr int kPairsPerBlock = 8;
  TANDEM_INLINE static auto decode(const uint8_t* block, int index) { return Isa::decode_uint2(block, index); }
  static constexpr auto halves_range() { return Isa::kUint2Range; }
  TANDEM_INLINE static auto halves(const uint8_t* block, int index) { return Isa::halves_uint2(block, index); }
};

template <class Isa>
struct Int3Format : Int4Format<Isa> {
  static constexpr int kPairBytes = 12;
  static constexpr int kPairsPerBlock = 8;
  static constexpr float kUnit = Isa::kInt3Unit;
  TANDEM_INLINE static auto decode(const uint8_t* block, int index) { return Isa::decode_int3(block, index); }
  static constexpr auto halves_range() { return Isa::kInt3Range; }
  TANDEM_INLINE static auto halves(const uint8_t* block, int index) { return Isa::halves_int3(block, index); }
};

template <class Isa>
constexpr int pairs_of_fp8() {
  if constexpr (requires { Isa::kFp8AtOnce; })
    return Isa::kFp8AtOnce;
  else
    return 1;
}

template <class Isa>
struct Fp8Format : Int8Format<Isa> {
  TANDEM_INLINE static auto decode(const uint8_t* block, int) { return Isa::decode_fp8(block); }
  // Several pairs of k in a row, where the tier decodes those faster than one after the other.
  static constexpr int kPairsAtOnce = pairs_of_fp8<Isa>();
  TANDEM_INLINE static auto decode_some(const uint8_t* block) { return Isa::decode_some_fp8(block); }
  static constexpr auto halves_range() { return Isa::kFp8Range; }
  TANDEM_INLINE static auto halves(const uint8_t* block, int index) { return Isa::halves_fp8(block, index); }
};

template <class Isa>
struct Fp4Format : Int4Format<Isa> {
  TANDEM_INLINE static auto decode(const uint8_t* block, int index) { return Isa::decode_fp4(block, index); }
  static constexpr auto halves_range() { return Isa::kFp4Range; }
  TANDEM_INLINE static auto halves(const uint8_t* block, int index) { return Isa::halves_fp4(block, index); }
};

// Not packed: 16 rows as they lie in a checkpoint, from which kPairsPerBlock pairs at a time become lines
// (whole_rows.h).
template <class Isa>
struct Bf16RowsFormat {
  using Lane = typename Isa::Lane;
  static constexpr int kPairBytes = 4;  // of a row
  static constexpr int kPairsPerBlock = 16;
  static constexpr bool kScaled = false;
  static constexpr bool kPacked = true;
  static constexpr bool kInRows = true;
  static constexpr float kUnit = 1.0f;
};

template <class Isa, Format kFormat>
struct GridFormat {
  using Lane = typename Isa::Lane;
  static constexpr Format kGrid = kFormat;
  static constexpr int kPairBytes = grid_block_bytes(kFormat) / kGridPairs;
  static constexpr int kPairsPerBlock = kGridPairs;
  static constexpr bool kScaled = true;
  static constexpr bool kPacked = true;
  static constexpr float kUnit = 1.0f;
};
template <class Isa>
struct Iq2XxsFormat : GridFormat<Isa, Format::iq2_xxs> {};
template <class Isa>
struct Iq2XsFormat : GridFormat<Isa, Format::iq2_xs> {};
template <class Isa>
struct Iq2SFormat : GridFormat<Isa, Format::iq2_s> {};
template <class Isa>
struct Iq3XxsFormat : GridFormat<Isa, Format::iq3_xxs> {};
template <class Isa>
struct Iq3SFormat : GridFormat<Isa, Format::iq3_s> {};
template <class Isa>
struct Iq1Format : GridFormat<Isa, Format::iq1> {};

// Whether a tier decodes codebooks in registers.
template <class Isa>
concept HasGridLines = requires { Isa::kGridRows; };

// Calls each(k, lines) for 32 k of a panel's blocks, as many at once as the tier keeps in registers.
template <class Isa, Format kGrid, class Each>
TANDEM_INLINE void grid_parts(const uint8_t* blocks, Each each) {
  if constexpr (requires { typename Isa::GridPart; }) {
#pragma GCC unroll 4
    for (int b = 0; b < 4; ++b, blocks += grid_block_bytes(kGrid)) {
      const auto codes = [&](int r) { return grid_codes<kGrid>(blocks, r); };
      if constexpr (kGrid == Format::iq2_xs)
        each(8 * b, Isa::template grid_part<true>(codes, Isa::grid_signs_with_eighth(blocks)));
      else
        each(8 * b, Isa::template grid_part<has_signs(kGrid)>(codes, Isa::grid_signs(blocks + signs_at(kGrid))));
    }
  } else {
    Isa::template grid_parts<kGrid>(blocks, each);
  }
}

template <class Format>
concept HasGrid = requires { Format::kGrid; };

template <class Format>
concept HasWholeRows = requires { Format::kInRows; };

// Of k, that few rows are multiplied with at once.
template <class Format>
constexpr int pairs_at_once() {
  if constexpr (requires { Format::kPairsAtOnce; })
    return Format::kPairsAtOnce;
  else
    return 1;
}

// Bytes of kGroups groups of scales and the halves in front of them.
constexpr int64_t shared_scale_bytes(int groups) { return kPanelRows * (2 + groups); }

template <class Isa, int kGroups>
TANDEM_INLINE typename Isa::Vec load_shared_scales(const uint8_t* panel_scales, int64_t group) {
  const uint8_t* block = panel_scales + group / kGroups * shared_scale_bytes(kGroups);
  const typename Isa::Vec codes = Isa::load_int8(block + kPanelRows * (2 + group % kGroups));
  return Isa::mul(codes, Isa::load_f16(reinterpret_cast<const uint16_t*>(block)));
}

// Of nibbles16: 16 groups, and the halves in front of them; from those of scales to those of shifts.
constexpr int64_t kNibbleGroups = 16, kNibbleHalfBytes = 2 * kPanelRows;
constexpr int64_t kNibbleTableBytes = 2 * kNibbleHalfBytes + kNibbleGroups * kPanelRows;

// bit: 0 for scales, 4 for shifts. to_bytes: from their halves to the first group's bytes.
template <class Isa>
TANDEM_INLINE typename Isa::Vec load_nibble_scales(const uint8_t* halves, int64_t group, int bit, int64_t to_bytes) {
  const uint8_t* table = halves + group / kNibbleGroups * kNibbleTableBytes;
  const typename Isa::Vec codes = Isa::load_nibbles(table + to_bytes + kPanelRows * (group % kNibbleGroups), bit);
  return Isa::mul(codes, Isa::load_f16(reinterpret_cast<const uint16_t*>(table)));
}

// Of odd8 and odd16.
template <class Isa, int kGroups>
TANDEM_INLINE typename Isa::Vec load_odd_scales(const uint8_t* panel_scales, int64_t group) {
  const uint8_t* table = panel_scales + group / kGroups * (kPanelRows * (2 + kGroups / 2));
  const uint8_t* bytes = table + kPanelRows * (2 + group % kGroups / 2);
  const typename Isa::Vec nibbles = group % 2 ? Isa::load_nibbles(bytes, 4) : Isa::load_nibbles(bytes, 0);
  const typename Isa::Vec odd = Isa::fma(nibbles, Isa::set1(0.25f), Isa::set1(0.125f));
  return Isa::mul(odd, Isa::load_f16(reinterpret_cast<const uint16_t*>(table)));
}

constexpr int64_t kFactorBytes = kPanelRows * int64_t(sizeof(float));  // of e4m3's factors, before the groups
// What 1 is loaded as: the largest such scale times any code of fp4 or int4 is a half.
constexpr float kE4m3Unit = 0x1p-12f;

// The 16 scales (or shifts that are stored as they are) of one group of one panel. Those of e4m3 are without their
// rows' factors, which finished sums are multiplied with: so a scale times a code of 4 bits is a bf16 number, exactly.
template <class Isa>
TANDEM_INLINE typename Isa::Vec load_scales(const uint8_t* panel_scales, ScaleType type, int64_t group) {
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(panel_scales) + 16 * group;
  if (type == ScaleType::bf16) return Isa::load_bf16(halves);
  if (type == ScaleType::f16) return Isa::load_f16(halves);
  if (type == ScaleType::e8m0) return Isa::load_e8m0(panel_scales + kPanelRows * group);
  if (type == ScaleType::e4m3)
    return Isa::mul(Isa::load_e4m3(panel_scales + kFactorBytes + kPanelRows * group), Isa::set1(kE4m3Unit));
  if (type == ScaleType::bytes8) return load_shared_scales<Isa, 8>(panel_scales, group);
  if (type == ScaleType::bytes16) return load_shared_scales<Isa, 16>(panel_scales, group);
  if (type == ScaleType::nibbles16) return load_nibble_scales<Isa>(panel_scales, group, 0, 2 * kNibbleHalfBytes);
  if (type == ScaleType::odd8) return load_odd_scales<Isa, 8>(panel_scales, group);
  if (type == ScaleType::odd16) return load_odd_scales<Isa, 16>(panel_scales, group);
  return Isa::load(reinterpret_cast<const float*>(panel_scales) + 16 * group);
}

template <class Isa>
TANDEM_INLINE typename Isa::Vec load_factors(const uint8_t* panel_scales) {
  return Isa::mul(Isa::load(reinterpret_cast<const float*>(panel_scales)), Isa::set1(1.0f / kE4m3Unit));
}

// How far a group's scales are from the next one's, to prefetch them; twice as far where they are single bytes, since
// shifts lie behind them and are wanted as well (Q4_K on AVX2, Zen 5: 0.94 instead of 1.10 ms).
constexpr int64_t group_bytes(ScaleType type) {
  if (type == ScaleType::nibbles16) return kNibbleTableBytes / kNibbleGroups;
  return kPanelRows * (type == ScaleType::f32 ? 4 : 2);
}

// The 16 shifts of one group of one panel, whose scales are `scale`.
template <class Isa>
TANDEM_INLINE typename Isa::Vec load_shifts(const uint8_t* panel_shifts, ScaleType scale_type, ShiftType type,
                                            int64_t group, typename Isa::Vec scale) {
  if (scale_type == ScaleType::nibbles16) return load_nibble_scales<Isa>(panel_shifts, group, 4, kNibbleHalfBytes);
  if (type != ShiftType::zeros) return load_scales<Isa>(panel_shifts, scale_type, group);
  return Isa::sub(Isa::zero(), Isa::mul(Isa::load_int8(panel_shifts + kPanelRows * group), scale));
}

}  // namespace
}  // namespace tandem
