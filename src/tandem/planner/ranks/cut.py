"""`cut`: a model as one of several ranks holds it: fewer heads, narrower experts. What each rank has a copy of stays.

A part's results are summands: ranks add them up. Routers and indexers are copied, so that all ranks choose alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tandem.mechanisms.cost import Limit, cost_of
from tandem.spec.drafts import Drafts
from tandem.spec.layers import Body, Layer
from tandem.spec.model_config import ModelConfig
from tandem.spec.shard import ALONE, MOST_RANKS, RankShard, refused
from tandem.spec.stored import UNQUANTISED, StoredFormats


def cut(
    model: ModelConfig, shard: RankShard, expert_unit: int = 1, stored: StoredFormats = UNQUANTISED
) -> ModelConfig:
    """Part of the model that rank `shard` holds.

    expert_unit: weights of an expert's width that belong together as stored; stored: the same for all other matrices.
    Raises ConfigError with the size that cannot be divided, and the numbers of ranks that can be.
    """
    check_ranks(model, shard.ranks, expert_unit, stored)
    if shard.ranks == 1:
        return model
    layers = tuple(_layer(layer, shard) for layer in model.layers)
    drafts, drafter = (_drafts(each, shard) for each in (model.drafts, model.drafter))
    return replace(model, layers=layers, drafts=drafts, drafter=drafter, shard=shard)


def check_ranks(
    model: ModelConfig, ranks: int, expert_unit: int = 1, stored: StoredFormats = UNQUANTISED
) -> None:
    """Raises what `cut` raises."""
    if ranks == 1:
        return
    if model.foreign is not None:
        raise refused(ranks, "a model that runs through Transformers' modules cannot be divided; leave --tp out")
    if against := [limit for limit in _limits(model, expert_unit, stored) if not limit.allows(ranks)]:
        named = " and ".join(map(str, against))
        possible = ", ".join(map(str, possible_ranks(model, expert_unit, stored)))
        raise refused(ranks, f"{named} cannot be divided among {ranks} ranks; possible: {possible}")


def possible_ranks(model: ModelConfig, expert_unit: int = 1, stored: StoredFormats = UNQUANTISED) -> list[int]:
    """How many ranks the model can be divided among."""
    limits = [] if model.foreign is not None else _limits(model, expert_unit, stored)
    most = MOST_RANKS if limits else 1
    return [1, *(ranks for ranks in range(2, most + 1) if all(limit.allows(ranks) for limit in limits))]


def divided(body: Body) -> bool:
    """Whether ranks have parts of it. One whose heads are normed together is copied: every rank computes the same."""
    return cost_of(body).sums > 0


def shard_of(model: ModelConfig, body: Body) -> RankShard:
    """Which part of that this rank has."""
    return model.shard if divided(body) else ALONE


def _layer(layer: Layer, shard: RankShard) -> Layer:
    blocks = tuple(replace(block, body=_body(block.body, shard.ranks)) for block in layer.blocks)
    return replace(layer, blocks=blocks)


def _drafts(drafts: Drafts | None, shard: RankShard) -> Drafts | None:
    return None if drafts is None else replace(drafts, layer=_layer(drafts.layer, shard))


def _body(body: Body, ranks: int) -> Body:
    return cost_of(body).cut(ranks) if divided(body) else body


def _limits(model: ModelConfig, expert_unit: int, stored: StoredFormats) -> list[Limit]:
    drafter = () if model.drafter is None else (model.drafter.layer,)
    bodies = [block.body for layer in (*model.layers, *drafter) for block in layer.blocks if divided(block.body)]
    limits = [limit for body in bodies for limit in _limits_of(body, expert_unit, stored)]
    return list(dict.fromkeys(limits))


def _limits_of(body: Body, expert_unit: int, stored: StoredFormats) -> Iterator[Limit]:
    """Limits on ranks of a layer's body; of its output, too, where some of its columns belong together as stored."""
    cost = cost_of(body)
    yield from cost.limits(expert_unit, stored)
    output = cost.output
    if output is not None and (unit := stored.dense.unit(output.name)) > 1:
        yield Limit(f"{output.inputs} inputs of {output.name}", output.inputs, unit)
