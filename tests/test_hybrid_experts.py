"""Loading a layer whose experts live on two sides, the GPU faked: every expert arrives once, where it belongs."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

import kernel_cases as cases
from tandem.errors import KernelError
from tandem.experts import cpu_experts
from tandem.experts.handoff import Handoff, HandoffSizes
from tandem.experts.hybrid_experts import HybridExperts
from tandem.kernels.gpu.uploads import Uploads
from tandem.kernels.packed_experts import PackedExperts

EXPERTS, HIDDEN, WIDTH, TOP_K = 11, 48, 32, 3
SLOTS = [0, -1, -1, 1, 2, 3, -1, 4, -1, -1, 5]


class FakeGpuExperts:
    """Notes what it is given."""

    def __init__(self, slot_of: Tensor) -> None:
        self.table, self.given, self.open = slot_of, dict[int, Any](), True

    def load_all(self, first: int, experts: list[Any]) -> None:
        assert self.open
        for expert, matrices in enumerate(experts, first):
            assert expert not in self.given
            self.given[expert] = matrices

    def all_loaded(self) -> None:
        self.open = False


def matrices(expert: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(expert)
    shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    gate, up, down = (torch.randn(shape, generator=g) for shape in shapes)
    return gate, up, down


def made(slots: list[int]) -> tuple[HybridExperts, FakeGpuExperts, PackedExperts]:
    slot_of = torch.tensor(slots, dtype=torch.int32)
    gpu, workspace = FakeGpuExperts(slot_of), cases.workspace_of("scalar")
    cpu = PackedExperts(workspace, len(slots), HIDDEN, WIDTH, "bf16", places=sum(s < 0 for s in slots))
    handoff = Handoff(HandoffSizes(1, 1, HIDDEN, TOP_K), torch.device("cpu"), 1.0)
    return HybridExperts(slot_of, cast(Any, gpu), cpu, handoff), gpu, cpu


@pytest.mark.parametrize("chunk", [1, 70_000, 1 << 28])  # bytes: one expert at a time, three, all
def test_every_expert_arrives_once_where_it_lives(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(cpu_experts, "CHUNK_BYTES", chunk)
    experts, gpu, cpu = made(SLOTS)
    experts.load(EXPERTS, matrices)
    assert sorted(gpu.given) == [e for e in range(EXPERTS) if SLOTS[e] >= 0] and not gpu.open
    whole = PackedExperts(cases.workspace_of("scalar"), EXPERTS, HIDDEN, WIDTH, "bf16")
    for expert in range(EXPERTS):
        if expert in gpu.given:
            assert all(map(torch.equal, gpu.given[expert], matrices(expert)))
        else:
            whole.load(expert, *matrices(expert))
            assert torch.equal(cpu.packed(expert), whole.packed(expert))
    assert cpu.loaded == SLOTS.count(-1)


def test_an_expert_that_cannot_be_read_ends_the_load() -> None:
    def broken(expert: int) -> tuple[Tensor, Tensor, Tensor]:
        if expert == 5:
            raise KernelError("expert 5 is torn")
        return matrices(expert)

    experts, _, _ = made(SLOTS)
    with pytest.raises(KernelError, match="expert 5 is torn"):
        experts.load(EXPERTS, broken)


def test_uploads_take_their_buffers_in_turn() -> None:
    """Five experts through two buffers and one packer; each target has its own expert's bytes."""
    packer = PackedExperts(cases.workspace_of("scalar"), 1, HIDDEN, WIDTH, "int4")
    whole = PackedExperts(cases.workspace_of("scalar"), 5, HIDDEN, WIDTH, "int4")
    uploads, targets = None, []
    for expert in range(5):
        packer.load(0, *matrices(expert))
        whole.load(expert, *matrices(expert))
        uploads = uploads or Uploads(packer.bytes_per_expert, torch.device("cpu"))
        targets.append(torch.zeros(packer.bytes_per_expert, dtype=torch.uint8))
        uploads.send(packer, targets[-1])
    assert uploads is not None
    uploads.finish()
    for expert, target in enumerate(targets):
        assert torch.equal(target, whole.packed(expert))
