#include "format/quantise.h"

#include <algorithm>
#include <cmath>

#include "format/codes.h"
#include "format/interleave.h"
#include "format/scale_table.h"

namespace tandem {
namespace {

float extreme(const float* w, int64_t n) {
  return *std::max_element(w, w + n, [](float a, float b) { return std::fabs(a) < std::fabs(b); });
}

// Codes of one row's group, one per byte. Adding and taking away 1.5 * 2^23 rounds to the nearest, ties to even, and
// unlike nearbyint() it is done four at a time.
void quantise_group(const float* in, int64_t count, float scale, float low, float high, uint8_t* codes) {
  constexpr float kRound = 12582912.0f;
  const float inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
  for (int64_t k = 0; k < count; ++k) {
    float code = in[k] * inverse;
    code = code > low ? code : low;  // low for NaN
    code = code > high ? high : code;
    codes[k] = uint8_t(int((code + kRound) - kRound));
  }
}

// Whole rows of codes, one per byte, to a panel.
void place_codes(const WeightView& w, uint8_t* codes, uint8_t* panel) {
  if (!is_nibble(w.format)) return interleave16(codes, w.padded_depth, kPanelRows, w.padded_depth / 2, panel);
  const int64_t bytes = kPanelRows * int64_t{w.padded_depth} / 2;
  for (int64_t i = 0; i < bytes; ++i) codes[i] = uint8_t((codes[2 * i] & 15) | codes[2 * i + 1] << 4);
  interleave_nibbles(codes, w.padded_depth / 2, kPanelRows, w.padded_depth / 8, panel);
}

}  // namespace

void quantise_rows(const WeightView& w, const std::vector<float>& rows, uint8_t* panel) {
  const int64_t group = w.group ? w.group : w.padded_depth;
  const float low = w.format == Format::int8 ? -127.0f : -8.0f, high = w.format == Format::int8 ? 127.0f : 7.0f;
  std::vector<uint8_t> codes(rows.size());
  for (int64_t r = 0; r < kPanelRows; ++r)
    for (int64_t g = 0; g < groups_of(w); ++g) {
      const int64_t first = r * w.padded_depth + g * group;
      const float top = extreme(rows.data() + first, group);
      put_scale(w, panel, g, r, w.format == Format::int8 ? std::fabs(top) / 127.0f : top / -8.0f);
      quantise_group(rows.data() + first, group, get_scale(w, panel, g, r), low, high, codes.data() + first);
    }
  place_codes(w, codes.data(), panel);
}

}  // namespace tandem
