"""Faces of the C++ core's packed weights: `PackedMatrix` (a dense linear) and `PackedExperts` (a layer's experts).

Both run on a `Workspace`: a worker pool, one kernel tier, and scratch for one call at a time. Activations are bfloat16
or float32; float32 ones are rounded to bfloat16 at the entry, except with f32 weights: there everything is float32.
Weights come as numbers, to be packed as f32, bf16, int8 or int4, or as codes (`formats/codes.py`), which are packed as
they are. On every tier but AMX a row's result does not depend on the batch or the number of threads, to the bit. The
arrays of `_core` itself may come from any library that speaks DLPack.
"""

from __future__ import annotations

from tandem._core import WorkerPool, Workspace
from tandem.formats.codes import WeightCodes
from tandem.kernels.packed.experts import PackedExperts
from tandem.kernels.packed.matrix import PackedHeads, PackedMatrix

__all__ = ["PackedExperts", "PackedHeads", "PackedMatrix", "WeightCodes", "WorkerPool", "Workspace"]
