"""Whole models whose dense matrices stay codes on the GPU: as close to float32 as Transformers is in bfloat16."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gpu import AVAILABLE, DEVICE, INTERPRETED, needs_triton
from quantised_models import BLOCKS, CHOICES, MACHINE, save_quantised
from sessions import Session, median, ours, prompts, reference
from tandem import _core
from tandem.architectures.load import load_config
from tandem.checkpoint import open_checkpoint
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.batch_layout import KernelBatch
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.reference import TorchOps
from tandem.machine.gpus import Gpu
from tandem.models import ForwardBatch
from tandem.models.linear import SideBySide
from tandem.planner.gpu_plan import dense_bytes
from tandem.planner.plan import Plan
from tandem.planner.resolve import resolve
from tiny import VARIANTS, TinyModels

if AVAILABLE:
    from tandem.kernels.gpu.dense_codes import GpuCodes
    from tandem.kernels.gpu.linear import GpuLinear
    from tandem.kernels.gpu.ops import GpuOps

pytestmark = [pytest.mark.gpu, needs_triton]
SLACK = 3.0 if INTERPRETED else 1.5  # it cuts bits off where bfloat16 rounds
FORMATS = {name: CHOICES[name] for name in CHOICES if name.startswith(("all", "fp8"))} | {
    "all awq": lambda module: None if ".experts." in module else "awq"  # experts of it are the CPU's
}


class PlainAttention:
    """Where Triton's interpreter would take bfloat16 for integers."""

    def begin(self, batch: KernelBatch, captured: bool) -> None: ...

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: KernelBatch,
        scale: float,
        window: int,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return TorchOps().attention(q, k, v, batch, scale, window, sinks)


class GpuSession(Session):
    """Batches go to the device, logits come back."""

    def __init__(self, path: Path, ops: GpuOps, plan: Plan, codes: bool) -> None:
        super().__init__(path, "bfloat16", plan.fuse_shared_experts, ops, expert_format=plan.expert_format,
                         dense_codes=codes)  # fmt: skip
        self.states = [tuple(array.to(DEVICE) for array in arrays) for arrays in self.states]
        forward = self.model.forward

        def there(batch: ForwardBatch, kv: list[tuple[Tensor, Tensor]]) -> Tensor:
            tensors = {f.name: getattr(batch, f.name) for f in fields(batch) if torch.is_tensor(getattr(batch, f.name))}
            moved = replace(batch, **{name: tensor.to(DEVICE) for name, tensor in tensors.items()})
            return forward(moved, kv).cpu()

        self.model.forward = there


@pytest.fixture(scope="module")
def ops() -> GpuOps:
    cpu = CpuOps(_core.WorkerPool([-1, -1]), _core.supported_tiers()[-1])
    return GpuOps(DEVICE, cpu, PlainAttention() if INTERPRETED else None)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """As test_quantised_models: shared experts, a dense layer, a router that is chosen by group."""
    family, changes = VARIANTS["glm4_moe"]
    VARIANTS["glm4_moe-blocks"] = (family, changes | BLOCKS)
    yield TinyModels(tmp_path_factory.mktemp("plain"))["glm4_moe-blocks"]
    del VARIANTS["glm4_moe-blocks"]


def planned(path: Path) -> Plan:
    gpu = replace(MACHINE, gpus=(Gpu("H100", 80 << 30, 80 << 30, "gen5 x16"),))
    return resolve(
        EngineConfig(model=str(path)), load_config(path), gpu, open_checkpoint(path).formats()
    )


def logits(session: Session) -> list[Tensor]:
    """Of all prompts and phases; in the interpreter, which is slow, a prompt's first tokens and two decode steps."""
    if not INTERPRETED:
        return ours(session)
    prompt = prompts()[2][:7]
    parts = [prompt[:5], prompt[5:6], prompt[6:]]
    return [torch.cat([session.step([(2, part)])[0] for part in parts])]


def expected(path: Path, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Transformers'."""
    whole = reference(path, dtype)
    return [whole[2][:7]] if INTERPRETED else whole


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_numbers(model: Path, ops: GpuOps, tmp_path: Path, name: str) -> None:
    quantised, plain = save_quantised(model, tmp_path, FORMATS[name])
    exact = expected(plain)
    theirs = median(expected(plain, torch.bfloat16), exact)
    chosen = planned(quantised)
    assert chosen.gpu is not None and chosen.dense_codes
    session = GpuSession(quantised, ops, chosen, codes=True)
    kinds = {type(read.weights) for read in session.model.layers[0].reads()}
    assert (GpuCodes in kinds) == (name != "all awq")
    got = logits(session)
    assert median(got, exact) < SLACK * theirs
    decoded = logits(GpuSession(quantised, ops, chosen, codes=False))
    assert median(decoded, exact) < SLACK * theirs and median(got, decoded) < SLACK * theirs


def test_what_has_no_kernels_is_joined_as_numbers(model: Path, ops: GpuOps, tmp_path: Path) -> None:
    """q and v in AWQ, k in fp8: two matrices of different kinds and the numbers of the others, side by side."""
    formats = {"q_proj": "awq", "k_proj": "fp8 blocks", "v_proj": "awq", "o_proj": "awq"}
    quantised, plain = save_quantised(model, tmp_path, lambda module: formats.get(module.rpartition(".")[2]))
    session = GpuSession(quantised, ops, planned(quantised), codes=True)
    attention = session.model.layers[0].blocks[0].operator
    assert isinstance(attention.qkv, SideBySide) and isinstance(attention.out, GpuLinear)
    assert [type(part) for part in attention.qkv.parts] == [GpuLinear, GpuCodes, GpuLinear]
    exact = expected(plain)
    assert median(logits(session), exact) < SLACK * median(expected(plain, torch.bfloat16), exact)


@pytest.mark.parametrize("name", ["all fp8", "all int8", "all gptq", "all mxfp4", "all awq"])
def test_the_plan_counts_what_dense_matrices_take(
    model: Path, ops: GpuOps, tmp_path: Path, name: str
) -> None:
    """Within 3 %, but for padding of the smallest matrices and norms in bfloat16, which real sizes do not show."""
    quantised, _ = save_quantised(model, tmp_path, FORMATS[name])
    stored, config = open_checkpoint(quantised).formats(), load_config(quantised)
    chosen = replace(planned(quantised), fuse_shared_experts=False)  # fused ones count among the routed
    session = GpuSession(quantised, ops, chosen, codes=True)
    matrices = {id(read.weights): read.weights for layer in session.model.layers for read in layer.reads()}
    held = sum(_bytes(m) for m in [*matrices.values(), session.model.head])
    embedding = config.vocab * config.hidden * 2
    norms = (2 * len(config.layers) + 1) * config.hidden * 2
    assert held + norms == pytest.approx(dense_bytes(config, "bfloat16", stored) - embedding, rel=0.05)


def _bytes(matrix: object) -> int:
    if isinstance(matrix, GpuCodes):
        return matrix.pool.nbytes
    return matrix.weight.nbytes if isinstance(matrix, GpuLinear) else 0
