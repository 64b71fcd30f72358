#include "bindings/names.h"

#include <stdexcept>

#include "bindings/tensor.h"

namespace tandem {
namespace {

const char* const kActivations[] = {"silu", "gelu", "gelu_tanh", "swiglu_clamp", "swiglu_oai", "silu_clamp", "relu2"};
const char* const kShiftNames[] = {"", "+offsets", "+zeros"};  // after the name of a scale type
const char* const kTiers[] = {"scalar", "avx2", "avx512", "avx512_bf16", "amx", "amx_standin"};

template <size_t N>
int index_of(const char* const (&names)[N], const std::string& name, const char* what) {
  std::string known;
  for (size_t i = 0; i < N; ++i) {
    if (name == names[i]) return int(i);
    known += (i ? ", " : "") + std::string(names[i]);
  }
  throw std::invalid_argument(std::string("unknown ") + what + " '" + name + "': take one of " + known);
}

}  // namespace

Format format_named(const std::string& name) { return Format(index_of(kFormatNames, name, "weight format")); }

ActivationKind activation_named(const std::string& name) {
  return ActivationKind(index_of(kActivations, name, "activation"));
}

ScaleType scale_type_named(const std::string& name) { return ScaleType(index_of(kScaleTypeNames, name, "scale type")); }

std::string scales_name_of(const WeightFormat& f) {
  return kScaleTypeNames[int(f.scale_type)] + std::string(kShiftNames[int(f.shift_type)]);
}

WeightFormat weight_format_named(const std::string& format, int group, const std::string& scales) {
  const size_t plus = scales.find('+');
  const std::string shifts = plus == std::string::npos ? "" : scales.substr(plus);
  const ShiftType shift_type = ShiftType(index_of(kShiftNames, shifts, "kind of offsets"));
  return {format_named(format), group, scale_type_named(scales.substr(0, plus)), shift_type};
}

const char* name_of(Tier tier) { return kTiers[int(tier)]; }

nanobind::tuple layout_of(const WeightView& w) {
  const std::string scales = scales_name_of(format_of(w));
  return nanobind::make_tuple(kFormatNames[int(w.format)], w.columns, w.depth, w.padded_depth, 2 * w.pairs,
                              w.panel_bytes, w.scale_offset, scales.c_str(), w.group, w.shift_offset);
}

}  // namespace tandem
