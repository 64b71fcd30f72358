"""`cut`: a model as one of several ranks holds it: fewer heads, narrower experts. What each rank has a copy of stays.

A part's results are summands: ranks add them up. Routers and indexers are copied, so that all ranks choose alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

from tandem.config.layers import Body, Layer
from tandem.config.model_config import ModelConfig
from tandem.config.ranks.shard import ALONE, Shard
from tandem.config.speculation.drafts import Drafts
from tandem.config.stored import UNQUANTISED, StoredFormat, StoredFormats
from tandem.errors import ConfigError
from tandem.mechanisms.channel_delta.shape import ChannelDelta
from tandem.mechanisms.delta_net.shape import DeltaRule
from tandem.mechanisms.dense.shape import Dense
from tandem.mechanisms.experts.shape import Moe
from tandem.mechanisms.grouped_query.shape import Gqa
from tandem.mechanisms.latent.shape import Latent
from tandem.mechanisms.shared_kv.shape import SharedKv
from tandem.mechanisms.short_conv.shape import ShortConv
from tandem.mechanisms.state_space.shape import StateSpace

MOST_RANKS = 64
UNGATED_HALVES = 2  # kernels take the rows of an expert without a gate in two halves


@dataclass(frozen=True, slots=True)
class Limit:
    """What must be divided: `size` of it, of which `unit` belong together. copied: or each rank has one of them, which
    several may share."""

    what: str
    size: int
    unit: int = 1
    copied: bool = False

    def allows(self, ranks: int) -> bool:
        return self.size % (self.unit * ranks) == 0 or (self.copied and ranks % self.size == 0)

    def __str__(self) -> str:
        return self.what if self.unit == 1 else f"{self.what}, which have groups of {self.unit},"


def cut(
    model: ModelConfig, shard: Shard, expert_unit: int = 1, stored: StoredFormats = UNQUANTISED
) -> ModelConfig:
    """What rank `shard` has of the model. expert_unit: weights of an expert's width that belong together as stored;
    stored: what says the same of all other matrices.

    Raises ConfigError with what cannot be divided, and the numbers of ranks that can be.
    """
    check_ranks(model, shard.ranks, expert_unit, stored)
    if shard.ranks == 1:
        return model
    layers = tuple(_layer(layer, shard) for layer in model.layers)
    drafts, drafter = (_drafts(each, shard) for each in (model.drafts, model.drafter))
    return replace(model, layers=layers, drafts=drafts, drafter=drafter, shard=shard)


def cut_experts(model: ModelConfig, shard: Shard, expert_unit: int = 1) -> ModelConfig:
    """The model with rank `shard`'s part of the routed experts; all else is whole. Raises ConfigError as `cut` does."""
    experts = model.moe.experts
    limit = Limit(f"{experts.width} rows of experts", experts.width, _least_rows(model.moe, expert_unit))
    if shard.ranks == 1:
        return model
    if not limit.allows(shard.ranks):
        possible = ", ".join(str(n) for n in range(1, MOST_RANKS + 1) if limit.allows(n))
        raise _refused(shard.ranks, f"{limit} cannot be divided among {shard.ranks} ranks; possible: {possible}")
    layers = tuple(_with_experts(layer, shard.ranks) for layer in model.layers)
    return replace(model, layers=layers, shard=shard)


def _with_experts(layer: Layer, ranks: int) -> Layer:
    bodies = [block.body for block in layer.blocks]
    cuts = [_experts(body, ranks) if isinstance(body, Moe) else body for body in bodies]
    return replace(layer, blocks=tuple(replace(b, body=c) for b, c in zip(layer.blocks, cuts, strict=True)))


def _experts(body: Moe, ranks: int) -> Moe:
    return replace(body, experts=replace(body.experts, width=body.experts.width // ranks))


def check_ranks(
    model: ModelConfig, ranks: int, expert_unit: int = 1, stored: StoredFormats = UNQUANTISED
) -> None:
    """Raises what `cut` raises."""
    if ranks == 1:
        return
    if model.foreign is not None:
        raise _refused(ranks, "a model that runs through Transformers' modules cannot be divided; leave --tp out")
    if against := [limit for limit in _limits(model, expert_unit, stored) if not limit.allows(ranks)]:
        named = " and ".join(map(str, against))
        possible = ", ".join(map(str, possible_ranks(model, expert_unit, stored)))
        raise _refused(ranks, f"{named} cannot be divided among {ranks} ranks; possible: {possible}")


def possible_ranks(model: ModelConfig, expert_unit: int = 1, stored: StoredFormats = UNQUANTISED) -> list[int]:
    """How many ranks the model can be divided among."""
    limits = [] if model.foreign is not None else _limits(model, expert_unit, stored)
    most = MOST_RANKS if limits else 1
    return [1, *(ranks for ranks in range(2, most + 1) if all(limit.allows(ranks) for limit in limits))]


def _refused(ranks: int, why: str) -> ConfigError:
    return ConfigError(f"--tensor-parallel-size {ranks}: {why}", fields=("tensor_parallel_size",))


def divided(body: Body) -> bool:
    """Whether ranks have parts of it. One whose heads are normed together is copied: every rank computes the same."""
    return not (isinstance(body, Gqa) and body.qk_norm == "width")


def shard_of(model: ModelConfig, body: Body) -> Shard:
    """Which part of that this rank has."""
    return model.shard if divided(body) else ALONE


def _layer(layer: Layer, shard: Shard) -> Layer:
    blocks = tuple(replace(block, body=_body(block.body, shard.ranks)) for block in layer.blocks)
    return replace(layer, blocks=blocks)


def _drafts(drafts: Drafts | None, shard: Shard) -> Drafts | None:
    return None if drafts is None else replace(drafts, layer=_layer(drafts.layer, shard))


def _body(body: Body, ranks: int) -> Body:
    return _CUTS[type(body)](body, ranks) if divided(body) else body


def _gqa(body: Gqa, ranks: int) -> Gqa:
    kv, copies = max(1, body.kv_heads // ranks), max(1, ranks // body.kv_heads)
    return replace(body, heads=body.heads // ranks, kv_heads=kv, kv_copies=copies)


def _delta(body: DeltaRule, ranks: int) -> DeltaRule:
    return replace(body, k_heads=body.k_heads // ranks, v_heads=body.v_heads // ranks)


def _shared_kv(body: SharedKv, ranks: int) -> SharedKv:
    return replace(body, heads=body.heads // ranks, out_groups=body.out_groups // ranks)


def _state_space(body: StateSpace, ranks: int) -> StateSpace:
    return replace(body, heads=body.heads // ranks, groups=body.groups // ranks)


def _dense(body: Dense, ranks: int) -> Dense:
    return replace(body, width=body.width // ranks)


def _moe(body: Moe, ranks: int) -> Moe:
    shared = None if body.shared is None else _dense(body.shared, ranks)
    beside = None if body.beside is None else replace(body.beside, dense=_dense(body.beside.dense, ranks))
    return replace(_experts(body, ranks), shared=shared, beside=beside)


_CUTS: dict[type, Callable[[Any, int], Body]] = {
    Gqa: _gqa,
    Latent: lambda body, ranks: replace(body, heads=body.heads // ranks),
    SharedKv: _shared_kv,
    DeltaRule: _delta,
    ChannelDelta: lambda body, ranks: replace(body, heads=body.heads // ranks),
    ShortConv: lambda body, ranks: replace(body, channels=body.channels // ranks),
    StateSpace: _state_space,
    Dense: _dense,
    Moe: _moe,
}


def _limits(model: ModelConfig, expert_unit: int, stored: StoredFormats) -> list[Limit]:
    drafter = () if model.drafter is None else (model.drafter.layer,)
    bodies = [block.body for layer in (*model.layers, *drafter) for block in layer.blocks if divided(block.body)]
    found = [limit for body in bodies for limit in (*_limits_of(body, expert_unit, stored), *_groups(body, stored))]
    return list(dict.fromkeys(found))


def _limits_of(body: Body, expert_unit: int, stored: StoredFormats) -> Iterator[Limit]:
    match body:
        case Gqa():
            yield Limit(f"{body.heads} query heads", body.heads)
            yield Limit(f"{body.kv_heads} heads of keys", body.kv_heads, copied=True)
        case Latent() | ChannelDelta():
            yield Limit(f"{body.heads} heads", body.heads)
        case SharedKv():
            yield Limit(f"{body.out_groups} groups of the output", body.out_groups)
        case DeltaRule():
            yield Limit(f"{body.k_heads} heads of keys of delta nets", body.k_heads)
        case StateSpace():
            yield Limit(f"{body.groups} groups of heads of state spaces", body.groups)
        case ShortConv():
            yield Limit(f"{body.channels} channels of convolutions", body.channels)
        case Dense():
            yield _width("dense layers", body, stored.dense)
        case Moe():
            yield from _limits_of_moe(body, expert_unit, stored)


def _groups(body: Body, stored: StoredFormats) -> Iterator[Limit]:
    """Of a mixer's output, whose columns are divided, where some of them belong together as stored."""
    if type(body) not in _OUTPUTS:
        return
    name, inputs = _OUTPUTS[type(body)]
    if (unit := stored.dense.unit(name)) > 1:
        yield Limit(f"{inputs(body)} inputs of {name}", inputs(body), unit)


_OUTPUTS: dict[type, tuple[str, Callable[[Any], int]]] = {
    Gqa: ("o_proj", lambda body: body.heads * body.value_dim),
    Latent: ("o_proj", lambda body: body.heads * body.value_dim),
    ChannelDelta: ("o_proj", lambda body: body.inner),
    SharedKv: ("o_b_proj", lambda body: body.out_groups * body.out_rank),
    DeltaRule: ("out_proj", lambda body: body.values),
    StateSpace: ("out_proj", lambda body: body.inner),
    ShortConv: ("out_proj", lambda body: body.channels),
}
"""The module that mixes what a body's heads have found, and its inputs."""


def _limits_of_moe(moe: Moe, unit: int, stored: StoredFormats) -> Iterator[Limit]:
    yield Limit(f"{moe.experts.width} rows of experts", moe.experts.width, _least_rows(moe, unit))
    if moe.shared is not None:
        yield _width("shared experts", moe.shared, stored.shared)
    if moe.beside is not None:
        yield _width("dense layers", moe.beside.dense, stored.dense)


def _least_rows(moe: Moe, unit: int) -> int:
    return unit if moe.experts.activation.gated else max(unit, UNGATED_HALVES)


def _width(what: str, dense: Dense, stored: StoredFormat) -> Limit:
    rows = 1 if dense.activation.gated else UNGATED_HALVES
    return Limit(f"{dense.width} rows of {what}", dense.width, lcm(rows, stored.unit("down_proj")))
