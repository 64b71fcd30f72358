#include "runtime/tiers.h"

#include <algorithm>
#include <map>
#include <stdexcept>

#include "abi/tiers.h"
#include "runtime/cpu_features.h"

namespace tandem {
namespace {

struct NamedTier {
  const char* name;
  const DenseKernels* dense;    // tiles are for matrices only
  const KernelTable* units[5];  // the first has what every tier needs, others add to it; null: no more

  bool is_built() const { return units[0] != nullptr; }
};

const NamedTier kTiers[] = {
    {"scalar", &kScalarDense, {&kScalarVectors, &kScalarIntegers}},
#if defined(TANDEM_BUILDS_avx2)
    {"avx2", &kAvx2Dense, {&kAvx2Vectors, &kAvx2Integers}},
#else
    {"avx2", &kAvx2Dense, {}},
#endif
#if defined(TANDEM_BUILDS_avx512)
    {"avx512", &kAvx512Dense, {&kAvx512Vectors, &kAvx512Integers}},
#else
    {"avx512", &kAvx512Dense, {}},
#endif
#if defined(TANDEM_BUILDS_avx512_bf16)
    {"avx512_bf16", &kAvx512Bf16Dense, {&kAvx512Bf16Vectors, &kAvx512Bf16Integers}},
#else
    {"avx512_bf16", &kAvx512Bf16Dense, {}},
#endif
#if defined(TANDEM_BUILDS_amx)
    {"amx", &kAvx512Bf16Dense, {&kAmxVectors, &kAmxIntegers, &kAmxNibbleTiles, &kAmxOtherTiles, &kAmxSmallTiles}},
#else
    {"amx", &kAvx512Bf16Dense, {}},
#endif
#if defined(TANDEM_BUILDS_amx_standin)
    {"amx_standin",
     &kScalarDense,
     {&kAmxStandinVectors, &kAmxStandinIntegers, &kAmxStandinNibbleTiles, &kAmxStandinOtherTiles,
      &kAmxStandinSmallTiles}},
#else
    {"amx_standin", &kScalarDense, {}},
#endif
};
constexpr const char* kStandin = "amx_standin";

std::string joined(const std::vector<std::string>& names, const char* between) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : between) + name;
  return text;
}

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

const NamedTier& tier_named(const std::string& name) {
  for (const NamedTier& tier : kTiers)
    if (tier.name == name) return tier;
  throw std::invalid_argument("there is no kernel tier '" + name + "': take one of " + joined(supported_tiers(), ", "));
}

// A tier that this CPU runs.
const NamedTier& tier_for_cpu(const std::string& name) {
  const NamedTier& tier = tier_named(name);
  if (name != kStandin && !contains(cpu_tiers(), name))
    throw std::invalid_argument("this CPU cannot run kernel tier '" + name + "': take one of " +
                                joined(supported_tiers(), ", "));
  return tier;
}

template <class T>
void take(T& to, T from) {
  if (from) to = from;
}

void add_unit(KernelTable& table, const KernelTable& unit) {
  for (int f = 0; f < kFormatCount; ++f) {
    take(table.formats[f].tile_mm, unit.formats[f].tile_mm);
    take(table.formats[f].part_rows, unit.formats[f].part_rows);
    take(table.formats[f].part_bytes, unit.formats[f].part_bytes);
    if (unit.int8[f].rows) table.int8[f] = unit.int8[f];
    if (unit.digits[f].rows) table.digits[f] = unit.digits[f];
  }
  take(table.peak, unit.peak);
  take(table.peak_int8, unit.peak_int8);
  take(table.round_row, unit.round_row);
  take(table.cut_row, unit.cut_row);
}

KernelTable table_of(const NamedTier& tier) {
  KernelTable table = *tier.units[0];
  for (const KernelTable* unit : tier.units)
    if (unit) add_unit(table, *unit);
  return table;
}

std::map<std::string, KernelTable> all_tables() {
  std::map<std::string, KernelTable> tables;
  for (const NamedTier& tier : kTiers)
    if (tier.is_built()) tables.emplace(tier.name, table_of(tier));
  return tables;
}

}  // namespace

std::vector<std::string> built_tiers() {
  std::vector<std::string> names;
  for (const NamedTier& tier : kTiers)
    if (tier.is_built()) names.push_back(tier.name);
  return names;
}

std::vector<std::string> supported_tiers() {
  const std::vector<std::string> built = built_tiers();
  std::vector<std::string> names;
  for (const std::string& name : cpu_tiers())
    if (contains(built, name)) names.push_back(name);
  return names;
}

const KernelTable& table_of_tier(const std::string& name) {
  static const std::map<std::string, KernelTable> tables = all_tables();
  tier_for_cpu(name);
  const auto found = tables.find(name);
  if (found != tables.end()) return found->second;
  throw std::invalid_argument("kernel tier '" + name + "' was not built: take one of " +
                              joined(supported_tiers(), ", ") +
                              ", or build it (TANDEM_TIERS=" + joined(built_tiers(), ",") + "," + name + " make venv)");
}

const DenseKernels& dense_kernels(const std::string& name) { return *tier_for_cpu(name).dense; }

const DenseKernels& widest_kernels() { return dense_kernels(cpu_tiers().back()); }

}  // namespace tandem
