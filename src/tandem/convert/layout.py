"""`Layout`: which output file holds what, to the byte, known before any weight is read.

It follows from the source's headers and the settings alone. So an interrupted conversion finds out what is done by
comparing headers, and a resumed one writes the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from tandem.convert.methods import Method, StoredPart
from tandem.convert.shard_file import ShardLayout, part_bytes
from tandem.convert.source import Module, SourceWeights, layer_of
from tandem.errors import ConfigError


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One piece of the output: a converted matrix, or a tensor copied from `copied` (its name in the source)."""

    parts: dict[str, StoredPart]
    layer: int
    module: Module | None = None
    copied: str = ""

    @property
    def written_bytes(self) -> int:
        return sum(part_bytes(name, part) for name, part in self.parts.items())


@dataclass(frozen=True)
class OutputShard:
    """One output file."""

    name: str
    items: tuple[OutputTensor, ...]

    @cached_property
    def layout(self) -> ShardLayout:
        return ShardLayout({name: part for item in self.items for name, part in item.parts.items()})


@dataclass(frozen=True)
class Layout:
    """All output files, layer after layer, and the modules that are converted."""

    shards: tuple[OutputShard, ...]
    converted: tuple[Module, ...]

    @property
    def output_bytes(self) -> int:
        return sum(shard.layout.file_bytes for shard in self.shards)

    @property
    def weight_map(self) -> dict[str, str]:
        return {name: shard.name for shard in self.shards for name in shard.layout.places}


def chosen_modules(source: SourceWeights, dense: bool) -> tuple[Module, ...]:
    """Routed experts, and with `dense` every other matrix that multiplies activations."""
    chosen = [m for m in source.modules.values() if m.routed or (dense and m.linear)]
    if not any(module.routed for module in chosen):
        raise ConfigError(
            f"{source.checkpoint.path} has no routed experts (tensors named ….experts.N.…) to convert"
        )
    return tuple(chosen)


def plan_layout(source: SourceWeights, method: Method, dense: bool, merge: bool, shard_bytes: int) -> Layout:
    """merge: files of up to `shard_bytes`; else one file for each decoder layer. Raises ConfigError when the method
    does not fit a matrix."""
    converted = chosen_modules(source, dense)
    items = sorted(
        _items(source, method, converted), key=lambda item: (item.layer, _natural(next(iter(item.parts))))
    )
    runs = list(_by_size(items, shard_bytes) if merge else _by_layer(items))
    names = (
        f"model-{i + 1:05}-of-{len(runs):05}" if merge else _layer_name(run) for i, run in enumerate(runs)
    )
    shards = [OutputShard(f"{name}.safetensors", tuple(run)) for name, run in zip(names, runs, strict=True)]
    return Layout(tuple(shards), converted)


def _items(source: SourceWeights, method: Method, converted: Iterable[Module]) -> Iterator[OutputTensor]:
    replaced: set[str] = set()
    for module in converted:
        method.check(module.name, module.shape[1])
        parts = {f"{module.name}.{suffix}": part for suffix, part in method.parts(*module.shape).items()}
        replaced.update(module.tensors)
        yield OutputTensor(parts, layer_of(module.name), module=module)
    for name, part in source.tensors():
        if name not in replaced:
            yield OutputTensor({_output_name(name): part}, layer_of(name), copied=name)


def _output_name(name: str) -> str:
    """DeepSeek's name of fp8 scales is the one that compressed-tensors has not: both are multiplied."""
    return re.sub(r"\.weight_scale_inv$", ".weight_scale", name)


def _by_size(items: Iterable[OutputTensor], most: int) -> Iterator[list[OutputTensor]]:
    run: list[OutputTensor] = []
    size = 0
    for item in items:
        if run and size + item.written_bytes > most:
            yield run
            run, size = [], 0
        run.append(item)
        size += item.written_bytes
    yield run


def _by_layer(items: Iterable[OutputTensor]) -> Iterator[list[OutputTensor]]:
    run: list[OutputTensor] = []
    for item in items:
        if run and item.layer != run[0].layer:
            yield run
            run = []
        run.append(item)
    yield run


def _layer_name(run: list[OutputTensor]) -> str:
    return f"layer-{run[0].layer:05}" if run[0].layer >= 0 else "outer"


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """Sorts experts.2 before experts.10."""
    return tuple((int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", name))
