// The names that Python uses for the enumerations of abi/.
#pragma once

#include <string>

#include "abi/kernel_table.h"

namespace tandem {

// All throw std::invalid_argument for an unknown name, listing the known ones.
Format format_named(const std::string& name);
ScaleType scale_type_named(const std::string& name);
ActivationKind activation_named(const std::string& name);
const char* name_of(Tier tier);

}  // namespace tandem
