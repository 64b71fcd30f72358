"""`Builder`: everything a layer needs to build itself: what to build, from which tensors, with which operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from tandem.checkpoint import Checkpoint
from tandem.errors import CheckpointError, KernelError
from tandem.experts import CpuExperts, ExpertFeed, ExpertMatrices, ExpertStore, RoutedExperts
from tandem.experts.feed import LayerMatrices, packable
from tandem.experts.usage.expert_usage import ExpertUsage
from tandem.formats.codes import Blocks, Weight, WeightCodes
from tandem.formats.cut import arranged, form_of, numbers, stacked, together, weight_bytes
from tandem.kernels.ops import MLP, ExpertBiases, ExpertCounts, Linear, Ops, RopeTables
from tandem.kernels.packed.cache import PackedCache
from tandem.mechanisms.dense.shape import Dense
from tandem.mechanisms.experts import shape as shapes
from tandem.models.linear import SideBySide
from tandem.models.names import check_groups
from tandem.planner.plan import Plan
from tandem.spec import rope as config_rope
from tandem.spec.model_config import STORED, ModelConfig, drafts, moe_index
from tandem.spec.norm import Norm
from tandem.spec.shard import ALL, Share, Size, cuts_of, whole_of
from tandem.spec.stored import RowTable
from tandem.spec.vision import image_turns

Orders = Sequence[Sequence[slice]]
"""Pieces of the rows of several matrices."""

Progress = Callable[[str, int, int], None]  # what is being loaded, bytes done, bytes in all


class Builder:
    """Reads tensors by their checkpoint names, with the shapes config.json implies, and packs them once."""

    def __init__(
        self,
        config: ModelConfig,
        plan: Plan,
        checkpoint: Checkpoint,
        ops: Ops,
        progress: Progress | None = None,
        store: ExpertStore | None = None,
        cache: PackedCache | None = None,
        usage: ExpertUsage | None = None,
    ) -> None:
        """store: where routed experts live; None: all of them where `ops` computes. usage: counts who was chosen."""
        self.config, self.plan, self.checkpoint, self.ops = config, plan, checkpoint, ops
        self.dtype: torch.dtype = getattr(torch, plan.dtype)
        self.dense_format = "f32" if self.dtype == torch.float32 else "bf16"
        self.mlp_format = (
            STORED if plan.dense_codes else self.dense_format
        )  # of dense MLPs and shared experts
        self._ropes: dict[config_rope.Rope, RopeTables] = {}
        self._store = store
        self._report = progress or (lambda _name, _done, _total: None)
        self._done, self._total = 0, checkpoint.nbytes()
        self._cache, self._usage = cache, usage
        self._in_place = plan.experts_in_place
        self._passing = (
            False if self._in_place else None
        )  # what is only read while loading: not experts, or all
        packs = store is not None or not self._in_place
        self._feed = ExpertFeed(config.moe_layers, plan.expert_format == STORED, ahead=packs)
        self._read_ahead(0)
        self._read_ahead(1)

    def place(self, layer: int) -> None:
        """Whatever is built from now on is computed where decoder layer `layer` is: on one device, all layers."""

    def rope(self, shape: config_rope.Rope) -> RopeTables:
        """Its tables for every position of the plan's context; layers that turn alike share them."""
        halves = replace(shape, pairs="halves")
        if halves not in self._ropes:
            image_rows = image_turns(self.config.vision, self.plan.max_step_tokens)
            table = rope_table(shape, self.plan.context_length + image_rows)
            self._ropes[halves] = RopeTables(self.ops.resident(table.cos), self.ops.resident(table.sin))
        return self._ropes[halves]

    @property
    def turning(self) -> list[tuple[RopeTables, Tensor]]:
        """Rotary tables by which rows of images turn, and which of three positions turns each pair, int64 [pairs]."""
        vision = self.config.vision
        axes = None if vision is None else torch.tensor(vision.axes)
        return [] if axes is None else [(rope, self.ops.resident(axes)) for rope in self._ropes.values()]

    def tensor(self, name: str, size: Size, *others: int) -> Tensor:
        """A small tensor (norm weight, bias), copied in the activations' dtype."""
        return self.ops.resident(self._get(name, size, *others).to(self.dtype, copy=True))

    def float_tensor(self, name: str, size: Size, *others: int) -> Tensor:
        """A small tensor, copied in float32."""
        return self.ops.resident(self._get(name, size, *others).to(torch.float32, copy=True))

    def norm(self, name: str, norm: Norm, size: int) -> Tensor:
        """A norm's weight as the operations take it: float32 where it multiplies before anything is rounded."""
        if norm.plus_one:
            return self.ops.resident(self._get(name, size).to(torch.float32, copy=True) + 1)
        return self.float_tensor(name, size) if norm.wide else self.tensor(name, size)

    def lookup(self, name: str, rows: int, columns: int, in_ram: bool = False) -> Callable[[Tensor], Tensor]:
        """Ids [T] → rows [T, columns] of a matrix that stays in the mapped file, or where `ops` computes; in_ram: in
        CPU memory whatever computes."""
        return self.ops.lookup(self.checkpoint.lookup(name, (rows, columns)), rows, in_ram)

    def table(self, module: str, shape: RowTable) -> Callable[[Tensor], Tensor]:
        """Numbers of rows, int64 [n] → rows [n, width], of the stored type or float32. They are read where the plan
        has the table, each time."""
        done, total = 0, shape.rows * shape.width

        def progress(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            self._report("reading a table of n-grams", done, max(done, total))

        return self.checkpoint.table(module, (shape.rows, shape.width), self.plan.tables, progress)

    def whole_numbers(self, name: str, size: int) -> Tensor:
        """A small tensor of whole numbers, int64."""
        return self.ops.resident(self.checkpoint.get(name, (size,), whole=True).to(torch.int64, copy=True))

    def linear(
        self,
        names: Sequence[str],
        rows: Sequence[Size],
        columns: int | Share,
        bias: bool = False,
        order: Orders = (),
    ) -> Linear:
        """The modules `names` (without `.weight`), stacked along their output rows, as one packed matrix; those whose
        formats differ side by side. order: of the rows of the first modules, where it is another than the
        checkpoint's. With `columns` that ranks share, results are summands, and a bias is the first rank's."""
        bias = bias and (cuts_of(columns) == [ALL] or self.config.shard.first)
        cached_parts = _packed_parts(self._packed, names)
        parts = cached_parts or self._linear(names, rows, columns, bias, order)
        return parts[0] if len(parts) == 1 else SideBySide(parts)

    def _linear(
        self, names: Sequence[str], rows: Sequence[Size], columns: int | Share, bias: bool, order: Orders
    ) -> list[Linear]:
        """One for each run of neighbours of one format."""
        weights = [self._held(self._weight(name, n, columns)) for name, n in zip(names, rows, strict=True)]
        biases = [
            self.tensor(f"{name}.bias", n) if bias else None for name, n in zip(names, rows, strict=True)
        ]
        for i, pieces in enumerate(order):
            weights[i] = arranged(weights[i], pieces)
            if (own := biases[i]) is not None:
                biases[i] = torch.cat([own[piece] for piece in pieces])
        runs = groupby(range(len(names)), lambda i: form_of(weights[i]))
        groups = [_joined(list(run), names, weights, biases) for _, run in runs]
        return [self._pack(name, weight, own, self.dense_format) for name, weight, own in groups]

    def convolution(self, name: str, rows: int, *kernel: int) -> Linear:
        """One whose kernels lie side by side, as the matrix of flattened patches that it is, with its bias."""
        packed = self._packed(name)
        if packed is not None:
            return packed
        weight = self._get(f"{name}.weight", rows, *kernel).flatten(1).to(self.dtype)
        return self._pack(name, weight, self.tensor(f"{name}.bias", rows), self.dense_format)

    def float_linear(self, name: str, rows: int, columns: int) -> Linear:
        """A matrix that is multiplied in float32 whatever the activations' dtype is (router gates)."""
        packed = self._packed(name)
        if packed is not None:
            return packed
        return self._pack(name, numbers(self._weight(name, rows, columns)).float(), None, "f32")

    def mlp(self, name: str, shape: Dense, matrices: Callable[[], ExpertMatrices]) -> MLP:
        """A dense MLP, which lives where `ops` computes, from an earlier start or from `matrices`."""
        mlp = self.ops.mlp(self.config.hidden, shape.width, self.dense_format, shape.activation)
        key = f"{name} as an expert"
        if self._cache is not None and self._cache.fill(key, mlp.packed):
            return mlp
        with named_errors(self.checkpoint.path):
            weights = matrices()
            self._done += sum(map(weight_bytes, weights))
            mlp.load(*packable(weights, as_codes=self.mlp_format == STORED))
        if self._cache is not None:
            self._cache.keep(key, mlp.packed)
        return mlp

    def experts(
        self,
        layer: int,
        shape: shapes.Experts,
        matrices_of: LayerMatrices,
        biases: ExpertBiases | None = None,
    ) -> RoutedExperts:
        """The experts of decoder layer `layer`, packed from `matrices_of(layer)(expert)`; meanwhile those of the next
        MoE layer are looked up. Where the plan says "stored", codes stay as they are."""
        fmt, count = self.plan.expert_format, shape.count
        plain, index = self.dense_format if fmt == STORED else fmt, moe_index(self.config, layer)
        experts: RoutedExperts
        if self._store is not None:
            experts = self._store.layer(index, count, shape.width, plain, shape.activation)
        else:
            packed = self.ops.experts(count, shape.channels(self.config.hidden), shape.width, plain, shape.activation)
            experts = CpuExperts(packed, self._in_place)
        cache_layer = None if self._cache is None else self._cache.layer(f"model.layers.{layer}.experts")
        feed = self._feed.layer(layer, count, matrices_of)
        with named_errors(self.checkpoint.path):
            experts.load(feed, cache_layer)
        if biases is not None:
            experts.set_biases(biases)
        self._done += feed.nbytes
        if self._usage is not None and not drafts(self.config, layer):
            self._usage.weigh(index, experts.expert_bytes)
        return experts

    def tally(self, layer: int) -> ExpertCounts | None:
        """Where decoder layer `layer` counts who was chosen; a draft layer does not."""
        if self._usage is None or drafts(self.config, layer):
            return None
        return self._usage.tally(moe_index(self.config, layer))

    def layer_done(self, index: int) -> None:
        """Between layers: lets go of the file pages that were read, asks for those after next, reports progress."""
        if self._cache is None or not self._cache.mapped:
            self.checkpoint.forget(index, experts=self._passing)
        self._read_ahead(index + 2)
        self._report(
            f"loading layer {index + 1}/{len(self.config.layers)}", min(self._done, self._total), self._total
        )

    def _read_ahead(self, layer: int) -> None:
        """Reads ahead what the checkpoint has and the packed cache does not."""
        if self._cache is None or not self._cache.mapped:
            self.checkpoint.read_ahead(layer)
        elif not self._cache.dense:
            self.checkpoint.read_ahead(layer, experts=False)

    def all_done(self) -> None:
        self._feed.close()
        self.checkpoint.release(self._passing)
        self._report("loading", self._total, self._total)
        if self._cache is not None:
            self._cache.finish(lambda done, total: self._report("writing packed cache", done, total))

    def _packed(self, name: str) -> Linear | None:
        """The matrix that an earlier start packed."""
        return None if self._cache is None else self._cache.matrix(name)

    def _pack(self, name: str, weight: Weight | Blocks, bias: Tensor | None, fmt: str) -> Linear:
        linear = self.ops.linear(weight, bias, fmt)
        if self._cache is not None:
            self._cache.keep(name, linear)
        return linear

    def _get(self, name: str, size: Size, *others: int) -> Tensor:
        whole = self.checkpoint.get(name, (whole_of(size), *others))
        pieces = [whole[cut] for cut in cuts_of(size)]
        tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        self._done += tensor.nbytes
        return tensor

    def _weight(self, name: str, rows: Size, columns: int | Share) -> Weight:
        shape, (inputs,) = (whole_of(rows), whole_of(columns)), cuts_of(columns)
        if isinstance(columns, Share):
            check_groups(self.checkpoint, name, columns)
        weight = together([self.checkpoint.weight(name, shape, own, inputs) for own in cuts_of(rows)])
        self._done += weight_bytes(weight)
        return weight

    def _held(self, weight: Weight) -> Weight:
        """Codes where the plan keeps them and there are kernels for them, else numbers in the activations' dtype: they
        are decoded before matrices are joined."""
        codes = self.plan.dense_codes and isinstance(weight, WeightCodes) and self.ops.reads(weight)
        return weight if codes else numbers(weight).to(self.dtype)


def _packed_parts(packed: Callable[[str], Linear | None], names: Sequence[str]) -> list[Linear]:
    """Matrices that an earlier start packed, each of as many neighbours as it stacked; [] where one is missing."""
    parts, first = list[Linear](), 0
    while first < len(names):
        for end in range(len(names), first, -1):
            if (part := packed("+".join(names[first:end]))) is not None:
                break
        else:
            return []
        parts, first = [*parts, part], end
    return parts


def _joined(
    run: list[int], names: Sequence[str], weights: Sequence[Weight], biases: Sequence[Tensor | None]
) -> tuple[str, Weight | Blocks, Tensor | None]:
    """Those of one format: what they are called together, and what that is."""
    whole = stacked([weights[i] for i in run])
    assert whole is not None, "they have one format"
    own_biases = [own for i in run if (own := biases[i]) is not None]
    return "+".join(names[i] for i in run), whole, torch.cat(own_biases) if own_biases else None


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Turns KernelError, of a weight that cannot be packed, into CheckpointError with the path."""
    try:
        yield
    except KernelError as error:
        raise CheckpointError(f"{path}: {error}; --kt-method BF16 decodes them") from error


def rope_table(rope: config_rope.Rope, positions: int) -> RopeTables:
    """cos and sin of position * frequency, times the table's factor, float32 [positions, rotary channels / 2]."""
    inverse = torch.tensor(rope.frequencies())
    if rope.scaling is None:  # as Transformers computes it, to the last bit
        inverse = 1.0 / rope.theta ** (torch.arange(0, rope.dims, 2, dtype=torch.float32) / rope.dims)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * inverse
    return RopeTables(angles.cos() * rope.table_factor, angles.sin() * rope.table_factor)
