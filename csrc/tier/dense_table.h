// Included once per tier by a file compiled with that tier's flags.
#pragma once

#include "micro/attention.h"
#include "micro/ceilings.h"
#include "micro/checksum.h"
#include "micro/fit.h"
#include "micro/norm_rope.h"
#include "micro/patches.h"
#include "micro/recurrent/channels.h"
#include "micro/recurrent/delta_rule.h"

#define TANDEM_DENSE_TABLE(name, tier, Isa) \
  namespace tandem {                        \
  const DenseKernels name = {               \
      tier,                                 \
      rms_norm<Isa>,                        \
      rotate_head<Isa>,                     \
      inverse_rms<Isa>,                     \
      widen<Isa>,                           \
      narrow<Isa>,                          \
      Attention<Isa>::attend,               \
      Attention<Isa>::merge,                \
      fit_groups<Isa>,                      \
      fit_panel<Isa>,                       \
      xxh3_blocks<Isa>,                     \
      conv_silu<Isa>,                       \
      conv_gated<Isa>,                      \
      multiply<Isa>,                        \
      DeltaRule<Isa>::step,                 \
      Fold<Isa>::template step<false>,      \
      Fold<Isa>::template step<true>,       \
      gated_norm<Isa>,                      \
      Channels<Isa>::to_unit,               \
      channel_decay<Isa>,                   \
      sigmoid_norm<Isa>,                    \
      through_gate<Isa>,                    \
      TokenScores<Isa>::scores,             \
      turn_head<Isa>,                       \
      layer_norm<Isa>,                      \
      gelu_row<Isa>,                        \
      Ceilings<Isa>::read_memory,           \
  };                                        \
  }
