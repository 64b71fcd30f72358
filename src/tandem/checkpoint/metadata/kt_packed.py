"""Experts that KTransformers' converter wrote: recognised, and refused with the command that makes ours.

Its layout is the tiles of its own AMX kernels, cut for a number of NUMA nodes, with one scale a row. There are two
kinds: loose files `_layer_3/_numa_0/INT4_down_7_123Byte_quant_.kt`, and safetensors without an index whose tensors are
called `blk.3.ffn_down_exps.7.numa.0.weight` (of AWQ: without the node).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tandem.checkpoint.mapped.shard import tensor_names
from tandem.errors import ConfigError

INDEX = "model.safetensors.index.json"
FLAG = "--kt-weight-path"
_TENSOR = re.compile(r"blk\.\d+\.ffn_(?:up|gate|down)_exps\.\d+\.(?:numa\.(\d+)\.)?(?:weight|scale|qzeros)")
_FILE = re.compile(r"(?:[A-Z]+_)?(INT[48])_(?:up|gate|down)_\d+_\d+Byte_(?:quant|scale)_\.kt")


def check_not_kt_packed(path: Path, model: Path | None = None) -> None:
    """Raises ConfigError where `path` is such a directory. model: the one whose experts these are; None: not known."""
    kind = _kind_of(path)
    if not kind:
        return
    method = "INT8" if "INT8" in kind or "INT8" in path.name.upper() else "INT4"
    source, ours = model or "MODEL", path.with_name(f"{path.name}-tandem")
    raise ConfigError(
        f"{path}: KTransformers' converter packed these experts ({kind}) in tiles that only its own kernels read. "
        f"Make ours once: kt convert {source} {ours} --method {method}, and give {FLAG} {ours}; "
        f"or leave {FLAG} out: --kt-method {method} rounds while loading",
        fields=("kt_weight_path",),
    )


def _kind_of(path: Path) -> str:
    """Kind of the packed experts at `path`, for people; "" for anything else."""
    if not path.is_dir():
        return ""
    loose = [file.name for layer in sorted(path.glob("_layer_*"))[:1] for file in layer.glob("_numa_*/*.kt")]
    kinds = {match[1] for match in map(_FILE.fullmatch, loose) if match}
    if kinds:
        return f"{kinds.pop()}, loose .kt files"
    if (path / INDEX).exists() or (first := next(iter(sorted(path.glob("*.safetensors"))), None)) is None:
        return ""
    return _merged(tensor_names(first))


def _merged(names: Iterable[str]) -> str:
    matches = [match for match in map(_TENSOR.fullmatch, names) if match]
    nodes = {match[1] for match in matches if match[1] is not None}
    if not matches:
        return ""
    return f"for {len(nodes)} NUMA nodes" if nodes else "AWQ by columns"
