"""Planner costs of routed experts, and of feed-forwards beside them, outside the experts' own placement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tandem.mechanisms import cost
from tandem.mechanisms.cost import Limit, cost_of
from tandem.mechanisms.dense.cost import UNGATED_HALVES, width_limit
from tandem.mechanisms.experts.shape import Moe
from tandem.spec.layers import Layer
from tandem.spec.model_config import ModelConfig
from tandem.spec.shard import MOST_RANKS, RankShard, refused
from tandem.spec.stored import StoredFormats


class Cost(cost.Cost[Moe]):
    """Cost of router, experts, and a shared one."""

    needs_kernels = False

    @property
    def between_bytes(self) -> int:
        """Bytes of a row between the shared expert's matrices."""
        return 0 if self.shape.shared is None else cost_of(self.shape.shared).between_bytes

    @property
    def sums(self) -> int:
        """Experts beside a dense feed-forward have norms of their own, and so sums."""
        return 1 if self.shape.parallel_dense is None else 2

    def cut(self, ranks: int) -> Moe:
        moe = with_narrow_experts(self.shape, ranks)
        shared = None if moe.shared is None else cost_of(moe.shared).cut(ranks)
        parallel = moe.parallel_dense
        dense_part = None if parallel is None else replace(parallel, dense=cost_of(parallel.dense).cut(ranks))
        return replace(moe, shared=shared, parallel_dense=dense_part)

    def limits(self, expert_unit: int, stored: StoredFormats) -> Iterator[Limit]:
        yield expert_limit(self.shape, expert_unit)
        if self.shape.shared is not None:
            yield width_limit("shared experts", self.shape.shared, stored.shared)
        if self.shape.parallel_dense is not None:
            yield width_limit("dense layers", self.shape.parallel_dense.dense, stored.dense)


def with_narrow_experts(moe: Moe, ranks: int) -> Moe:
    """With one of so many ranks' part of the routed experts; all else is whole."""
    return replace(moe, experts=replace(moe.experts, width=moe.experts.width // ranks))


def expert_limit(moe: Moe, unit: int) -> Limit:
    """Divisibility limit of routed experts. unit: weights of their width that belong together as stored."""
    least = unit if moe.experts.activation.gated else max(unit, UNGATED_HALVES)
    return Limit(f"{moe.experts.width} rows of experts", moe.experts.width, least)


def cut_experts(model: ModelConfig, shard: RankShard, expert_unit: int = 1) -> ModelConfig:
    """The model with rank `shard`'s part of the routed experts; all else is whole. Raises ConfigError as `cut` does."""
    limit = expert_limit(model.moe, expert_unit)
    if shard.ranks == 1:
        return model
    if not limit.allows(shard.ranks):
        counts = ", ".join(str(n) for n in range(1, MOST_RANKS + 1) if limit.allows(n))
        raise refused(shard.ranks, f"{limit} cannot be divided among {shard.ranks} ranks; possible: {counts}")
    layers = tuple(_with_experts(layer, shard.ranks) for layer in model.layers)
    return replace(model, layers=layers, shard=shard)


def _with_experts(layer: Layer, ranks: int) -> Layer:
    bodies = [block.body for block in layer.blocks]
    cuts = [with_narrow_experts(body, ranks) if body is layer.moe else body for body in bodies]
    return replace(layer, blocks=tuple(replace(b, body=c) for b, c in zip(layer.blocks, cuts, strict=True)))
