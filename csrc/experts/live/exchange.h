// Two experts of a layer that change places.
#pragma once

namespace tandem {

struct Exchange {
  int layer;
  int slot;     // of the layer's on the GPU, where
  int leaving;  // ... this expert is, and
  int coming;   // this one, which is in CPU memory, is to be.
};

}  // namespace tandem
