"""State spaces (Mamba 2): the recurrence against float64, token by token; and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig

from tandem.config import ModelConfig
from tandem.config.mechanisms.norm import Norm
from tandem.config.mechanisms.state_space import StateSpace
from tandem.errors import ConfigError
from tandem.kernels.recurrent.state_space import StateSpaceWeights, TorchStateSpace
from tandem.kernels.shared_kv.rows import step_rows
from tandem.models import ForwardBatch
from tiny import COMMON, VARIANTS

SHAPE = StateSpace(heads=6, head_dim=10, groups=2, state=12, taps=4, norm=Norm(1e-5))
WIDTH = SHAPE.inner + SHAPE.channels + SHAPE.heads
LENGTH = 150  # more than two chunks


def weights(g: torch.Generator) -> StateSpaceWeights:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    return StateSpaceWeights(
        random(SHAPE.taps, SHAPE.channels), random(SHAPE.channels), -random(SHAPE.heads).exp(), random(SHAPE.heads),
        random(SHAPE.heads), random(SHAPE.inner),
    )  # fmt: skip


def exact(projected: Tensor, w: StateSpaceWeights) -> Tensor:
    """One sequence from nothing, float64."""
    s, w = SHAPE, StateSpaceWeights(*(part.double() for part in w if part is not None))
    gate, new, steps = projected.double().split([s.inner, s.channels, s.heads], dim=1)
    padded = torch.cat([new.new_zeros(s.taps - 1, s.channels), new])
    mixed = F.silu(sum(padded[i : i + len(new)] * w.conv[i] for i in range(s.taps)) + w.conv_bias)
    x, written, asked = mixed.split([s.inner, s.groups * s.state, s.groups * s.state], dim=1)
    x, steps = x.unflatten(1, (s.heads, s.head_dim)), F.softplus(steps + w.step_bias)
    written, asked = (
        part.unflatten(1, (s.groups, s.state)).repeat_interleave(s.heads // s.groups, 1) for part in (written, asked)
    )
    memory, rows = new.new_zeros(s.heads, s.head_dim, s.state), []
    for t in range(len(new)):
        memory = memory * (steps[t] * w.decay).exp()[:, None, None]
        memory = memory + (steps[t][:, None] * x[t])[..., None] * written[t][:, None]
        rows.append((memory * asked[t][:, None]).sum(-1) + w.through[:, None] * x[t])
    y = (torch.stack(rows).flatten(1) * F.silu(gate)).unflatten(1, (s.groups, -1))
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + s.norm.eps)
    return w.norm * y.flatten(1)


def batch(pieces: list[tuple[int, int, int]]) -> ForwardBatch:
    """(slot, first position, rows) of each sequence."""
    rows = [count for _, _, count in pieces]
    starts = torch.tensor([0, *rows]).cumsum(0).int()
    positions = torch.cat([torch.arange(first, first + count) for _, first, count in pieces])
    return ForwardBatch(
        positions, positions, positions, starts, torch.tensor([first + count for _, first, count in pieces]).int(),
        torch.zeros(len(pieces), 1).int(), torch.arange(sum(rows)), torch.tensor([slot for slot, _, _ in pieces]).int(),
    )  # fmt: skip


@pytest.mark.parametrize("cuts", [[150], [1, 2, 147], [64, 64, 22], [149, 1], [3] * 50])
def test_every_cut_gives_what_float64_gives(cuts: list[int]) -> None:
    """Beside another sequence, whose rows come between; slots hold another's numbers before."""
    g = torch.Generator().manual_seed(len(cuts))
    w, space = weights(g), None
    space = TorchStateSpace(SHAPE, w)
    each = [torch.randn(LENGTH, WIDTH, generator=g) for _ in range(2)]
    ring, memory = torch.randn(4, 5, SHAPE.channels, generator=g), torch.randn(4, 6, 10, 12, generator=g)
    found: list[list[Tensor]] = [[], []]
    at = 0
    for count in cuts:
        rows = torch.cat([part[at : at + count] for part in each])
        seen = space(rows, step_rows(batch([(3, at, count), (1, at, count)])), ring, memory)
        for kept, part in zip(found, seen.split(count), strict=True):
            kept.append(part)
        at += count
    for kept, part in zip(found, each, strict=True):
        wanted = exact(part, w)
        assert ((torch.cat(kept) - wanted).abs().max() / wanted.abs().max()).item() < 1e-5


@pytest.mark.parametrize(
    ("variant", "key", "value", "message"),
    [
        ("nemotron_h", "moe_latent_size", 24, "moe_latent_size is not supported: experts .* between two projections"),
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
        ModelConfig.from_dict(keys | {key: value})


def test_a_pattern_of_letters_is_the_list_of_words() -> None:
    """As the hub has Nemotron 3."""
    model_type, changes = VARIANTS["nemotron_h"]
    keys = json.loads(AutoConfig.for_model(model_type, **(COMMON | changes)).to_json_string(use_diff=False))
    other = {key: value for key, value in keys.items() if key != "layers_block_type"} | {
        "hybrid_override_pattern": "ME*EME"
    }
    assert ModelConfig.from_dict(other).layers == ModelConfig.from_dict(keys).layers
