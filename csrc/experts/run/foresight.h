// Experts that a layer will probably be asked for. From `begin` until workers compute (or `end`), idle workers prefetch
// their gate and up, the most probable expert's first. Each worker takes what it will compute itself (OwnPairs).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "experts/store/expert_store.h"
#include "runtime/tally.h"

namespace tandem {

constexpr int64_t kMostHintedTokens = 4;  // of a batch: more choose more experts than there is time for

class Foresight {
 public:
  // ids: the most probable first. Those that are repeated, do not exist or are not in this layer are left out.
  void begin(std::shared_ptr<const ExpertStore> layer, const std::vector<int32_t>& ids);
  bool fetch_a_little();  // by the caller, which waits; false if nothing is left
  void end();

  // Experts of that layer whose shares (ExpertStore::shared_gate_up) are fetched, in this order; null: none are.
  const std::vector<int32_t>* of(const ExpertStore& layer) const;

  // What was asked for in the end.
  void compare(const ExpertStore& layer, const std::vector<int32_t>& ids);
  void forget();

  int64_t hinted() const { return hinted_; }  // experts that were compared, each once per hint
  int64_t hits() const { return hits_; }      // of those, that were asked for
  int64_t bytes() const { return bytes_; }    // of their weights that were fetched

 private:
  std::shared_ptr<const ExpertStore> layer_;  // of the last hint, until it is compared
  std::vector<int32_t> ids_;
  std::vector<SharedRange> ranges_;
  bool fetching_ = false;
  Tally<int64_t> hinted_, hits_, bytes_;
};

}  // namespace tandem
