"""`QuantHints`: what `quantization_config` says that tensors cannot say for themselves.

Formats are detected tensor by tensor (`layouts.py`), so that mixed checkpoints need no exact key; the configuration
only settles what names, types and shapes leave open.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.errors import CheckpointError
from tandem.spec.json_keys import read_json

KEY = "quantization_config"
METHODS = (
    "fp8", "fbgemm_fp8", "compressed-tensors", "gptq", "gptq_v2", "awq", "mxfp4", "mxfp8", "modelopt", "modelopt_fp4",
    "w4afp8", "quark",
)  # fmt: skip
AUTO_ROUND = ("auto-round", "auto_round", "intel/auto-round")
"""Names of a program that writes others' tensors: its `packing_format` says whose."""
_SPARSE_FREE = ("dense", None)


@dataclass(frozen=True, slots=True)
class QuantHints:
    """All optional: a checkpoint without `quantization_config` has none."""

    where: str = "config.json"
    method: str = ""
    blocks: tuple[tuple[int, int], ...] = ()  # (rows, columns) of fp8 blocks
    groups: tuple[int, ...] = ()  # group sizes along K
    bits: int = 0  # of int codes
    act_order: bool | None = None  # groups along K are permuted
    gptq_version: int = 0  # 1: zero points are stored less 1; 2: as they are
    symmetric: bool = False  # GPTQ's and AWQ's zero points are all in the middle


def quant_hints(directory: Path) -> QuantHints:
    """From `config.json`, or ModelOpt's `hf_quant_config.json`. CheckpointError for a method that is not known."""
    for name, key in (("config.json", KEY), ("hf_quant_config.json", "quantization")):
        if (directory / name).is_file():
            config = read_json(directory / name)
            settings = config.get(key) or _text_part(config).get(key)
            if settings:
                return parse_hints(settings, f"{directory / name}: {key}")
    return QuantHints(f"{directory / 'config.json'}: {KEY}")


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Multimodal models keep the language model's keys one level down."""
    part = config.get("text_config")
    return part if isinstance(part, dict) else {}


def parse_hints(config: object, where: str) -> QuantHints:
    """`config`: the JSON object at `where`."""
    if not isinstance(config, dict):
        raise CheckpointError(f'{where} is {config!r}, not an object; try {{"quant_method": "fp8"}}')
    method, format_text = _method(config, where)
    _refuse_sparse(config, where)
    _refuse_rotations(config, where)
    sections = list(_sections(config))
    return QuantHints(
        where=where,
        method=method,
        blocks=tuple(dict.fromkeys(block for section in sections for block in _blocks(section))),
        groups=tuple(dict.fromkeys(group for section in sections for group in _groups(section))),
        bits=_bits(sections, where),
        act_order=_act_order(sections),
        gptq_version=_gptq_version(format_text, method, where),
        symmetric=config.get("sym") is True or config.get("zero_point") is False,
    )


def _method(config: Mapping[str, Any], where: str) -> tuple[str, str]:
    """The method that wrote the tensors, and the version of GPTQ's; "": only the tensors tell."""
    method = str(config.get("quant_method") or ("modelopt" if "quant_algo" in config else ""))
    if method not in (*METHODS, *AUTO_ROUND, ""):
        names = ", ".join((*METHODS, *AUTO_ROUND))
        raise CheckpointError(f"{where}.quant_method {method!r} cannot be read; these can: {names}")
    if method not in AUTO_ROUND:
        return method, str(config.get("checkpoint_format") or method)
    packing = str(config.get("packing_format") or "").rpartition(":")[2]
    return {"auto_gptq": ("gptq", "gptq"), "auto_awq": ("awq", "")}.get(packing, ("", ""))


def _sections(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The object itself, `linear_fp8_config`, and the weights of every config group."""
    yield config
    groups = config.get("config_groups")
    for section in (config.get("linear_fp8_config"), *(groups.values() if isinstance(groups, dict) else ())):
        if isinstance(section, dict):
            weights = section.get("weights")
            yield weights if isinstance(weights, dict) else section


def _blocks(section: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    for key in ("weight_block_size", "block_structure"):
        value = section.get(key)
        if isinstance(value, list) and len(value) == 2 and all(type(v) is int and v > 0 for v in value):
            yield value[0], value[1]


def _groups(section: Mapping[str, Any]) -> Iterator[int]:
    for key in ("group_size", "q_group_size"):
        value = section.get(key)
        if type(value) is int and value > 0:
            yield value


def _bits(sections: Iterable[Mapping[str, Any]], where: str) -> int:
    """Bits of integers, 4 or 8; 0 where nothing or several things are said. Raises CheckpointError for others."""
    widths = {s.get("bits", s.get("w_bit", s.get("num_bits"))) for s in sections} - {None}
    for value in widths - {4, 8}:
        raise CheckpointError(f"{where}: {value!r} bits cannot be read; 4 and 8 can")
    return int(widths.pop()) if len(widths) == 1 else 0


def _act_order(sections: Iterable[Mapping[str, Any]]) -> bool | None:
    """GPTQ's `desc_act`; compressed-tensors' `actorder`, where only "group" leaves the groups permuted."""
    orders = [s["desc_act"] is True for s in sections if "desc_act" in s]
    orders += [s["actorder"] in (True, "group", "dynamic") for s in sections if "actorder" in s]
    return any(orders) if orders else None


def _gptq_version(written: str, method: str, where: str) -> int:
    if method not in ("gptq", "gptq_v2"):
        return 0
    if written not in ("gptq", "gptq_v2"):
        raise CheckpointError(
            f'{where}.checkpoint_format {written!r} cannot be read; try "gptq" or "gptq_v2"'
        )
    return 2 if written == "gptq_v2" else 1


def _refuse_sparse(config: Mapping[str, Any], where: str) -> None:
    sparsity = config.get("sparsity_config")
    written = sparsity.get("format") if isinstance(sparsity, dict) else None
    if written not in _SPARSE_FREE:
        raise CheckpointError(f'{where}.sparsity_config.format {written!r} cannot be read; "dense" can')


def _refuse_rotations(config: Mapping[str, Any], where: str) -> None:
    """Quark can write models whose activations must be rotated while they run."""
    entries = config.get("algo_config")
    names = [str(each.get("name")) for each in entries if isinstance(each, dict)] if isinstance(entries, list) else []
    if rotations := [name for name in names if name in ("rotation", "quarot")]:
        raise CheckpointError(f"{where}.algo_config {rotations[0]!r} cannot be read: activations are not rotated here")
