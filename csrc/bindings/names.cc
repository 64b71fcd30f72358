#include "bindings/names.h"

#include <stdexcept>

#include "format/pack.h"

namespace tandem {
namespace {

const char* const kActivations[] = {"silu", "gelu", "gelu_tanh", "swiglu_clamp", "swiglu_oai"};
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

const char* name_of(Tier tier) { return kTiers[int(tier)]; }

}  // namespace tandem
