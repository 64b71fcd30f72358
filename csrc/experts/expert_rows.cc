// Experts used where they are, in whole rows: usually a checkpoint's mapped file.
#include <algorithm>
#include <stdexcept>

#include "experts/expert_layer.h"
#include "runtime/memory.h"

namespace tandem {
namespace {
constexpr int64_t kMapBytes = int64_t{2} << 20;  // per task
}

void ExpertLayer::check_packed() const {
  if (in_place()) throw std::invalid_argument("this layer's experts are used where they are; there is no packed copy");
}

void ExpertLayer::take_rows(const std::vector<int>& experts, const std::vector<ExpertSource>& sources) {
  check_activations();
  NewPlaces taken(places_);
  take_places(taken, experts);
  std::vector<ByteRange> parts;
  for (size_t i = 0; i < sources.size(); ++i) {
    const auto data = [](const MatrixSource& matrix) { return static_cast<const uint8_t*>(matrix.data); };
    rows_[size_t(experts[i])] = {data(sources[i].gate), data(sources[i].up), data(sources[i].down)};
    for (const ByteRange& matrix : rows_of(experts[i], 1))
      for (int64_t at = 0; at < matrix.bytes; at += kMapBytes)
        parts.push_back({matrix.data + at, std::min(kMapBytes, matrix.bytes - at)});
  }
  workspace_->pool().for_each(int64_t(parts.size()), [&](int64_t i, const Worker&) {
    map_for_reading(parts[size_t(i)].data, parts[size_t(i)].bytes);
  });
  for (size_t i = 0; i < sources.size(); ++i) pack_biases(experts[i], sources[i]);
  taken.keep();
}

std::vector<ByteRange> ExpertLayer::rows_of(int first, int count) const {
  const int64_t gate_up = packed_bytes(gate_up_layout_) / 2, down = packed_bytes(down_layout_);
  std::vector<ByteRange> ranges;
  for (int expert = first; expert < first + count; ++expert) {
    if (!is_loaded(expert)) continue;
    const Rows& rows = rows_[size_t(expert)];
    ranges.insert(ranges.end(), {{rows.gate, gate_up}, {rows.up, gate_up}, {rows.down, down}});
  }
  return ranges;
}

}  // namespace tandem
