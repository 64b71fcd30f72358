// Of a layer of experts: rounds of down beside the sums of the ones before, on workers that come and go, always give
// the same bits (experts/run/down.cc; built with results of 256 KiB in all, so that a small layer has more rounds than
// are kept); and results of a call fit their scratch (ops/workspace.h).
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "abi/tiers.h"
#include "experts/store/expert_store.h"
#include "runtime/tiers.h"

namespace tandem {
// Only the scalar tier's vectors are linked, and no dense kernels.
const DenseKernels& widest_kernels() { std::abort(); }
}  // namespace tandem

namespace {

using namespace tandem;

constexpr int kExperts = 5, kHidden = 1208, kWidth = 16, kTokens = 300, kTopK = 4;

std::vector<float> numbers(size_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> made(count);
  for (float& x : made) x = normal(random);
  return made;
}

MatrixSource matrix(const std::vector<float>& values, int64_t rows, int64_t depth) {
  return {values.data(), DType::f32, rows, depth};
}

void load(ExpertStore& layer, std::mt19937& random) {
  for (int expert = 0; expert < kExperts; ++expert) {
    const auto gate = numbers(kWidth * kHidden, random), up = numbers(kWidth * kHidden, random),
               down = numbers(kHidden * kWidth, random);
    layer.load(expert, {matrix(gate, kWidth, kHidden), matrix(up, kWidth, kHidden), matrix(down, kHidden, kWidth)});
  }
}

// nodes: of two workers. Of two nodes each has fewer pairs of panels than rounds would be needed.
bool always_the_same(std::vector<int> nodes) {
  std::mt19937 random(1);
  const auto pool = std::make_shared<WorkerPool>(std::vector<int>{-1, -1}, 200, std::move(nodes));
  const WeightFormat format{Format::f32, 0, ScaleType::f32};
  ExpertStore layer(std::make_shared<Workspace>(pool, kScalarVectors),
                    {kExperts, kHidden, kWidth, format, format, {ActivationKind::silu, 0.0f, 0.0f}});
  load(layer, random);
  const std::vector<float> x = numbers(kTokens * kHidden, random), weights = numbers(kTokens * kTopK, random);
  std::vector<int32_t> ids(kTokens * kTopK);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = int32_t((i / kTopK + i % kTopK) % kExperts);
  std::vector<float> first, out(kTokens * kHidden);
  for (int i = 0; i < 10; ++i) {
    layer.forward(
        {{x.data(), DType::f32, kTokens, kHidden}, ids.data(), weights.data(), kTopK, out.data(), DType::f32, false});
    if (i == 0) first = out;
    if (std::memcmp(first.data(), out.data(), out.size() * sizeof(float))) return false;
  }
  return true;
}

// Kernels write whole tiles of 16 rows.
bool results_fit() {
  KernelTable table = kScalarVectors;
  table.blocking.pairs_per_call = kMaxPairsPerCall;
  table.blocking.most_pairs = 32;
  const Workspace workspace(std::make_shared<WorkerPool>(std::vector<int>{-1}), table);
  for (int64_t rows = 1; rows <= kMaxRowsPerCall; ++rows)
    if ((rows + 15) / 16 * 16 * tile_stride(workspace.most_pairs(rows)) * 4 > Workspace::kTileBytes) return false;
  return workspace.most_pairs(80) == 32 && workspace.most_pairs(kMaxRowsPerCall) == kMaxPairsPerCall;
}

int failed(const char* what) {
  std::fprintf(stderr, "expert_layer_test: %s\n", what);
  return 1;
}

}  // namespace

int main() {
  if (!results_fit()) return failed("results of a call do not fit");
  if (!always_the_same({}) || !always_the_same({0, 1})) return failed("another result");
  std::puts("expert_layer_test: ok");
}
