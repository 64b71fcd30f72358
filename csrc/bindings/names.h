// The names that Python uses for the enumerations of abi/.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "abi/kernel_table.h"
#include "format/pack.h"

namespace tandem {

// All throw std::invalid_argument for an unknown name, listing the known ones.
Format format_named(const std::string& name);
ScaleType scale_type_named(const std::string& name);
ActivationKind activation_named(const std::string& name);
const char* name_of(Tier tier);

// Scale type and what is added, in one name: "f16", "bytes8+offsets", "f16+zeros".
std::string scales_name_of(const WeightFormat& format);
WeightFormat weight_format_named(const std::string& format, int group, const std::string& scales);

// How packed panels are read on a GPU: (format, columns, depth, padded depth, panels, panel bytes, offset of the
// scales, their type as `scales_name_of` has it, group, offset of what is added after scaling).
nanobind::tuple layout_of(const WeightView& view);

}  // namespace tandem
