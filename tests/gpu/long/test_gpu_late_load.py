"""A model is loaded right, however far the GPU lags behind its host: whole GPUs that several processes share do."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor

from gpu import needs_cuda
from tandem.engine.start.loader import load_parts
from tandem.experts.live.copies import CudaCopies
from tandem.experts.usage.expert_usage import CopiedCounts
from tandem.flags.engine_config import EngineConfig
from tiny import VOCAB

pytestmark = [pytest.mark.gpu, needs_cuda]
CYCLES, EMBEDDING_CYCLES = 40_000_000, 500_000_000  # 20 and 250 ms; the embedding is the last that is uploaded
NO_WEIGHTS = "stream", "_handoff", "handoff", "_scratch", "tally", "ops", "_ops"


def weights_of(owner: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Tensors on the GPU that it has, in closures, too."""
    if isinstance(owner, Tensor):
        if owner.is_cuda:
            yield name, owner
        return
    if id(owner) in seen or isinstance(owner, str | bytes | int | float | type):
        return
    seen.add(id(owner))
    for key, each in parts_of(owner).items():
        if key not in NO_WEIGHTS:
            yield from weights_of(each, f"{name}.{key}", seen)


def parts_of(owner: Any) -> dict[str, Any]:
    if isinstance(owner, dict):
        return {str(key): each for key, each in owner.items()}
    if isinstance(owner, list | tuple):
        return {str(i): each for i, each in enumerate(owner)}
    if isinstance(owner, partial):
        return {"func": owner.func, "args": owner.args}
    if isinstance(owner, FunctionType):
        names = owner.__code__.co_freevars
        return dict(zip(names, (cell.cell_contents for cell in owner.__closure__ or ()), strict=True))
    if not type(owner).__module__.startswith("tandem."):
        return {}
    slots = [name for kind in type(owner).__mro__ for name in getattr(kind, "__slots__", ())]
    return {**getattr(owner, "__dict__", {}), **{name: getattr(owner, name) for name in slots if hasattr(owner, name)}}


def loaded(path: Path, share: float) -> dict[str, Tensor]:
    """Weights on the GPU, as they are once it has done all that it was given."""
    gc.collect()
    torch.cuda.empty_cache()  # memory is handed out as in a process of its own
    parts = load_parts(
        EngineConfig.from_keywords(
            str(path), device="cuda", kt_gpu_experts_ratio=share, kt_cpuinfer=2, max_total_tokens=256,
            max_running_requests=2, disable_cuda_graph=True, disable_dynamic_expert_update=True,
        )
    )  # fmt: skip
    torch.cuda.synchronize()
    return {name: each.cpu().clone() for name, each in weights_of(parts.model, "model", set())}


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("variant", ["deepseek_v4-every", "qwen3_moe-gpu"])
def test_weights_are_those_of_a_gpu_that_is_never_late(
    tiny_models, variant: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload is read later; the allocator hands its memory out at once. So did the ring get that of
    the embedding, and copies of experts were there first."""
    from tandem.kernels.gpu import ops

    expected, upload, late = loaded(tiny_models[variant], share), ops.uploaded, []

    def uploaded(blocks: Any, *others: Any) -> Tensor:
        made = upload(blocks, *others)
        late.append(EMBEDDING_CYCLES if sum(map(len, blocks)) == VOCAB else CYCLES)
        torch.cuda._sleep(late[-1])
        return made

    monkeypatch.setattr(ops, "uploaded", uploaded)
    got = loaded(tiny_models[variant], share)
    assert got.keys() == expected.keys() and any("embedding" in name for name in got)
    assert late[-1] == EMBEDDING_CYCLES
    wrong = [name for name in got if not torch.equal(bits(got[name]), bits(expected[name]))]
    assert not wrong


def test_memory_of_counts_is_let_go_of_once_they_have_arrived() -> None:
    """The next load takes it for weights, and PyTorch knows nothing of this copy."""
    device = torch.device("cuda", 0)
    counts = CopiedCounts(torch.ones(3, 2, 4, dtype=torch.int32, device=device))
    torch.cuda.synchronize()
    torch.cuda._sleep(EMBEDDING_CYCLES)
    arrived = counts.ask(CudaCopies(device).in_order)._arrived
    assert arrived is not None and not arrived.query()
    del counts
    assert arrived.query()


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor
