"""Memories of constant size: recurrence and convolution against float64, at every cut; and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig

from tandem import _core
from tandem.architectures.load import config_from_dict
from tandem.checkpoint import open_checkpoint
from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.step_rows import StepContext
from tandem.kernels.this_machine import this_machine
from tandem.mechanisms.recurrence.cpu import CpuStateUpdates
from tandem.mechanisms.recurrence.tokens import RecurrentTokens
from tandem.mechanisms.recurrence.torch import StateUpdates, Taps, TorchStateUpdates, taps_of
from tandem.models import ForwardBatch
from tandem.models.passing import ForwardState
from tandem.planner.choices.deferral import deferred_experts
from tandem.quality.stream import Variant
from tiny import COMMON, VARIANTS

TIERS = ("torch", *_core.supported_tiers())
HEADS, GROUPS, KEYS, VALUES, TAPS = 6, 2, 12, 21, 4
LENGTH = 150  # more than two chunks


def folds_of(tier: str) -> StateUpdates:
    return TorchStateUpdates() if tier == "torch" else CpuStateUpdates(CpuOps(_core.WorkerPool([-1, -1]), tier))


def tokens_of(g: torch.Generator, corrects: bool) -> RecurrentTokens:
    """Keys of unit length where the memory is corrected, which else would grow."""
    asked, written = (torch.randn(LENGTH, GROUPS, KEYS, generator=g) for _ in range(2))
    decay = -torch.rand(LENGTH, HEADS, KEYS if corrects else 1, generator=g)
    beta = torch.rand(LENGTH, HEADS, generator=g) if corrects else None
    written = F.normalize(written, dim=-1) if corrects else written
    return RecurrentTokens(asked, written, torch.randn(LENGTH, HEADS, VALUES, generator=g), decay, beta)


def exact(tokens: RecurrentTokens) -> Tensor:
    """One sequence from nothing, float64."""
    asked, written, values, decay = (part.double() for part in tokens[:4])
    asked, written = (part.repeat_interleave(HEADS // GROUPS, 1) for part in (asked, written))
    memory, rows = values.new_zeros(HEADS, KEYS, VALUES), []
    for t in range(len(values)):
        memory = memory * decay[t].exp()[..., None]
        added = values[t]
        if tokens.beta is not None:
            added = (added - (memory * written[t][..., None]).sum(1)) * tokens.beta[t].double()[:, None]
        memory = memory + written[t][..., None] * added[:, None]
        rows.append((memory * asked[t][..., None]).sum(1))
    return torch.stack(rows)


def step_of(pieces: list[tuple[int, int, int]]) -> StepContext:
    """(slot, first position, rows) of each sequence."""
    rows = [count for _, _, count in pieces]
    starts = torch.tensor([0, *rows]).cumsum(0).int()
    positions = torch.cat([torch.arange(first, first + count) for _, first, count in pieces])
    batch = ForwardBatch(
        positions, positions, positions, starts, torch.tensor([first + count for _, first, count in pieces]).int(),
        torch.zeros(len(pieces), 1).int(), torch.arange(sum(rows)), torch.tensor([slot for slot, _, _ in pieces]).int(),
    )  # fmt: skip
    return ForwardState(batch, torch.empty(0))


def taps_for(g: torch.Generator, channels: int, biased: bool) -> Taps:
    conv = torch.randn(channels, TAPS, generator=g)
    return taps_of(conv, torch.randn(channels, generator=g) if biased else None)


def mixed(taps: Taps, rows: Tensor) -> Tensor:
    """A convolution of one sequence from nothing, float64, rounded to the rows' type."""
    padded = torch.cat([torch.zeros(TAPS - 1, rows.shape[1]), rows.float()]).double()
    found = sum(padded[i : i + len(rows)] * taps.weights[i].double() for i in range(TAPS))
    return (found if taps.bias is None else found + taps.bias.double()).to(rows.dtype)


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    """A sum may be rounded to the number beside."""
    return torch.allclose(found.float(), wanted.float(), rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-4)


CUTS = [[150], [1, 2, 147], [64, 64, 22], [149, 1], [3] * 50]


@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("tier", TIERS)
def test_every_cut_gives_what_float64_gives(tier: str, cuts: list[int], corrects: bool) -> None:
    """Beside another sequence, whose rows come between; slots hold another's numbers before."""
    g, folds = torch.Generator().manual_seed(len(cuts)), folds_of(tier)
    each, found = [tokens_of(g, corrects) for _ in range(2)], [list[Tensor](), list[Tensor]()]
    memory, at = torch.randn(4, HEADS, KEYS, VALUES, generator=g), 0
    for count in cuts:
        parts = zip(*each, strict=True)
        both = RecurrentTokens(
            *(None if a is None else torch.cat([a[at : at + count], b[at : at + count]]) for a, b in parts)
        )
        seen = folds.folded(both, step_of([(3, at, count), (1, at, count)]), memory)
        for kept, part in zip(found, seen.split(count), strict=True):
            kept.append(part)
        at += count
    for kept, tokens in zip(found, each, strict=True):
        wanted = exact(tokens)
        assert ((torch.cat(kept) - wanted).abs().max() / wanted.abs().max()).item() < 1e-5


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tier", TIERS)
def test_every_cut_is_convolved_alike(tier: str, dtype: torch.dtype, cuts: list[int], biased: bool) -> None:
    channels, g, folds = 300, torch.Generator().manual_seed(1), folds_of(tier)
    taps = taps_for(g, channels, biased)
    each = [torch.randn(LENGTH, channels, generator=g).to(dtype) for _ in range(2)]
    ring, at, found = torch.randn(4, TAPS, channels, generator=g).to(dtype), 0, [list[Tensor](), list[Tensor]()]
    for count in cuts:
        rows = torch.cat([part[at : at + count] for part in each])
        seen = folds.convolved(rows, step_of([(3, at, count), (1, at, count)]), ring, taps)
        for kept, part in zip(found, seen.split(count), strict=True):
            kept.append(part)
        at += count
    for kept, part in zip(found, each, strict=True):
        assert close(torch.cat(kept), F.silu(mixed(taps, part)), dtype)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tier", TIERS)
def test_every_cut_is_gated_alike(tier: str, dtype: torch.dtype, cuts: list[int], biased: bool) -> None:
    """Between the cuts comes a rejected draft token, whose row nobody asks for later."""
    channels, g, folds = 300, torch.Generator().manual_seed(2), folds_of(tier)
    taps, found = taps_for(g, channels, biased), [list[Tensor](), list[Tensor]()]
    each = [torch.randn(LENGTH, 3 * channels, generator=g).to(dtype) for _ in range(2)]
    ring, at = torch.randn(4, TAPS + 1, channels, generator=g).to(dtype), 0
    for count in cuts:
        rows = torch.cat([part[at : at + count] for part in each])
        seen = folds.gated(rows, step_of([(3, at, count), (1, at, count)]), ring, taps)
        for kept, part in zip(found, seen.split(count), strict=True):
            kept.append(part)
        at += count
        folds.gated(torch.randn(1, 3 * channels, generator=g).to(dtype), step_of([(3, at, 1)]), ring, taps)
    for kept, part in zip(found, each, strict=True):
        before, behind, values = part.chunk(3, dim=1)
        assert close(torch.cat(kept), behind * mixed(taps, before * values), dtype)


def test_what_a_memory_cannot_do_is_refused() -> None:
    """By the core, before anything is written."""
    g, folds = torch.Generator().manual_seed(1), folds_of("scalar")
    tokens, memory = tokens_of(g, False), torch.zeros(4, HEADS, KEYS, VALUES)
    with pytest.raises(ValueError, match="fold: a slot is not there"):
        folds.folded(tokens, step_of([(4, 0, LENGTH)]), memory)
    step = step_of([(1, 0, LENGTH)])
    step.batch.state_lens, step.batch.num_verified = torch.zeros(1).int(), torch.full((1,), LENGTH - 1).int()
    with pytest.raises(ValueError, match="fold: a memory cannot take draft tokens back"):
        folds.folded(tokens, step, memory)
    ring = torch.zeros(4, TAPS - 1, 8)
    with pytest.raises(ValueError, match="convolve: too many taps, or a ring that is too short"):
        folds.convolved(torch.zeros(LENGTH, 8), step, ring, Taps(torch.zeros(TAPS, 8)))


@pytest.mark.parametrize(
    ("variant", "key", "value", "message"),
    [
        ("nemotron_h", "moe_intermediate_size", 20, "20, but feed-forwards without a gate have a width of whole 32s"),
        ("nemotron_h", "mlp_hidden_act", "gelu", "mlp_hidden_act = 'gelu' is not supported"),
        ("nemotron_h", "layers_block_type", ["moe", "rwkv"], "layer type 'rwkv' is not supported; linear_attention"),
        ("nemotron_h", "layers_block_type", ["linear_attention"], "without experts or without attention"),
        ("granitemoehybrid", "time_step_limit", [0.01, 1.0], "time_step_limit = .* is not supported; null is"),
        ("granitemoehybrid", "mamba_n_heads", 7, "7 heads of 16 in 3 groups do not make 144 channels"),
        ("granitemoehybrid", "residual_multiplier", 0.0, "must be above 0"),
        ("lfm2_moe", "conv_L_cache", 12, "conv_L_cache is 12, and must be 2 to 8; try 3"),
    ],
)
def test_what_is_missing_is_named(variant: str, key: str, value: object, message: str) -> None:
    model_type, changes = VARIANTS[variant]
    keys = json.loads(AutoConfig.for_model(model_type, **(COMMON | changes)).to_json_string(use_diff=False))
    with pytest.raises(ConfigError, match=message):
        config_from_dict(keys | {key: value})


def test_a_pattern_of_letters_is_the_list_of_words() -> None:
    """As the hub has Nemotron 3."""
    model_type, changes = VARIANTS["nemotron_h"]
    keys = json.loads(AutoConfig.for_model(model_type, **(COMMON | changes)).to_json_string(use_diff=False))
    other = {key: value for key, value in keys.items() if key != "layers_block_type"} | {
        "hybrid_override_pattern": "ME*EME"
    }
    assert config_from_dict(other).layers == config_from_dict(keys).layers


def test_experts_in_fewer_channels_are_never_deferred(tiny_models) -> None:
    """Each layer projects their sum by itself."""
    variant = Variant(tiny_models["nemotron_h-latent"], deferred=2)
    model = variant.model()
    with pytest.raises(ConfigError, match="--late 2: each layer's experts have a projection of their own"):
        variant.plan(model, this_machine(), 8, open_checkpoint(variant.directory).formats())
    deferred, why = deferred_experts(EngineConfig(model="m", kt_max_deferred_experts_per_token=2), model, 0, (1, 8))
    assert deferred == 0 and why.startswith("each layer's experts")
    assert model.expert_channels == 40 and model.expert_params == 2 * 40 * 32
