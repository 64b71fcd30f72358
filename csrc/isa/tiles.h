// What tiles of any kind take: where their rows lie.
#pragma once

#include <stdint.h>

namespace tandem {
namespace {

// Bytes from a row to the next one, also of the next tile, and from 32 k to the next.
struct TileRows {
  const uint8_t* at;
  int64_t apart, step;
};

}  // namespace
}  // namespace tandem
