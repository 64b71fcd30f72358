"""Run beside a copy of `src/` that has Quilted: how far its logits are from the reference, on every CPU side."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from quilted_reference import logits, save

from sessions import Session, ours, prompts, worst
from tandem import _core
from tandem.architectures import FAMILIES
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.reference import TorchOps

assert "quilted" in FAMILIES, "not the copy"
path = Path(sys.argv[1]) / "quilted"
weights = save(path)
expected = [logits(weights, prompt) for prompt in prompts()]
sides = {"torch": TorchOps(), "cpu": CpuOps(_core.WorkerPool([-1, -1]), _core.supported_tiers()[-1])}
print(json.dumps({name: worst(ours(Session(path, ops=ops)), expected) for name, ops in sides.items()}))
