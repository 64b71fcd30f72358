// Experts used where they are, in whole rows: usually a checkpoint's mapped file.
#include <algorithm>
#include <array>
#include <stdexcept>

#include "experts/store/expert_store.h"
#include "runtime/memory.h"

namespace tandem {
namespace {
constexpr int64_t kMapBytes = int64_t{2} << 20;  // per task
}

void ExpertStore::check_packed() const {
  if (in_place()) throw std::invalid_argument("this layer's experts are used where they are; there is no packed copy");
}

void ExpertStore::take_rows(const std::vector<int>& experts, const std::vector<ExpertSource>& sources) {
  check_activations();
  std::vector<Rows> found;
  std::vector<ByteRange> parts;
  const auto data = [](const MatrixSource& matrix) { return static_cast<const uint8_t*>(matrix.data); };
  for (const ExpertSource& source : sources) {
    found.push_back({data(source.gate), data(source.up), data(source.down)});
    for (const ByteRange& matrix : matrices(found.back()))
      for (int64_t at = 0; at < matrix.bytes; at += kMapBytes)
        parts.push_back({matrix.data + at, std::min(kMapBytes, matrix.bytes - at)});
  }
  workspace_->pool().for_each(int64_t(parts.size()), [&](int64_t i, const Worker&) {
    map_for_reading(parts[size_t(i)].data, parts[size_t(i)].bytes);
  });
  NewCpuSlots taken(cpu_slots_);
  take_cpu_slots(taken, experts);
  for (size_t i = 0; i < sources.size(); ++i) rows_[size_t(experts[i])] = found[i];
  taken.keep();
}

std::array<ByteRange, 3> ExpertStore::matrices(const Rows& rows) const {
  const int64_t gate_up = packed_bytes(gate_up_layout_) / 2, down = packed_bytes(down_layout_);
  return {{{rows.gate, gate_up}, {rows.up, gate_up}, {rows.down, down}}};
}

std::vector<ByteRange> ExpertStore::rows_of(int first, int count) const {
  std::vector<ByteRange> ranges;
  for (int expert = first; expert < first + count; ++expert) {
    if (!is_loaded(expert)) continue;
    const auto all = matrices(rows_[size_t(expert)]);
    ranges.insert(ranges.end(), all.begin(), all.end());
  }
  return ranges;
}

}  // namespace tandem
