"""Every matrix of a checkpoint at once, from headers: checked when it is opened, and summed up for the planner."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import lcm

from tandem.checkpoint.layouts import detect
from tandem.checkpoint.parts import Parts, TensorPart, codes_part, is_expert, is_table, one_expert
from tandem.checkpoint.quant_hints import QuantHints
from tandem.checkpoint.stored_matrix import FLOATS, StoredMatrix
from tandem.formats.quant_format import QuantFormat
from tandem.spec.stored import StoredFormat, StoredFormats

Survey = Mapping[str, tuple[StoredMatrix, int]]
"""Module → how one of its matrices is stored, and how many weights it has in all experts together."""


_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
KINDS = ("experts", "shared", "dense", "embedding")
GATES, UPS = (".gate_proj", ".w1"), (".up_proj", ".w3")  # how names of experts' matrices end; `gate_up_proj` is neither
NUMBERS = ("kv_b_proj", ".k_b_proj", ".v_b_proj", "o_a_proj", "_hc.fn", "hc_fn")  # as `model_config.number_params`


def survey(modules: Mapping[str, Parts], hints: QuantHints) -> Survey:
    """CheckpointError names the first matrix whose scales are missing or do not fit."""
    matrices: dict[str, tuple[StoredMatrix, int]] = {}
    by_form: dict[object, tuple[StoredMatrix, int] | None] = {}  # thousands of experts have the same few forms
    for module, parts in modules.items():
        part = codes_part(parts)
        if part is None or is_table(part.name):
            continue
        form = part.name[-7:], *[(role, p.dtype, p.shape) for role, p in parts.items()]
        if form not in by_form:
            by_form[form] = _surveyed(part, parts, hints)
        one = by_form[form]
        if one is not None:
            matrices[module] = one
    return matrices


def _surveyed(part: TensorPart, parts: Parts, hints: QuantHints) -> tuple[StoredMatrix, int] | None:
    """None for what is no matrix."""
    if not _is_matrix(part, parts):
        return None
    stored = detect(_single(parts, part), hints)
    n, k = stored.shape
    return stored, (part.shape[0] if _is_fused(part, parts) else 1) * n * k


def _is_matrix(part: TensorPart, parts: Parts) -> bool:
    """Tables of integers, biases and the kernels of convolutions are none."""
    if part.name.endswith("bias"):
        return False
    if part.dtype in FLOATS:
        return len(part.shape) in (2, 3)
    return (
        part.dtype == "F8_E4M3"
        or len(parts) > 1
        or (part.dtype in ("I8", "U8") and part.name.endswith(".weight"))
    )


def _is_fused(part: TensorPart, parts: Parts) -> bool:
    return len(part.shape) > (3 if "blocks" in parts else 2)


def _single(parts: Parts, part: TensorPart) -> Parts:
    return one_expert(parts) if _is_fused(part, parts) else parts


def stored_formats(matrices: Iterable[tuple[str, QuantFormat, int]]) -> StoredFormats:
    """From (module, its format, its number of weights) of every matrix; weighed by numbers of weights. What is never
    computed from codes has no part in it."""
    counts: dict[str, Counter[QuantFormat]] = defaultdict(Counter)
    units: dict[str, dict[str, int]] = defaultdict(dict)
    sums: dict[
        tuple[str, int], tuple[QuantFormat, int]
    ] = {}  # few formats, many matrices: told apart by identity first
    by_layer: dict[int, Counter[float]] = defaultdict(Counter)  # of experts: weights by bytes per weight
    gates, ups = defaultdict[int, set[QuantFormat]](set), defaultdict[int, set[QuantFormat]](set)  # likewise, formats
    for module, fmt, weights in matrices:
        key = kind, _ = _kind(module), id(fmt)
        sums[key] = fmt, weights + (sums[key][1] if key in sums else 0)
        if kind == "experts":
            by_layer[layer := _layer(module)][fmt.bytes_per_weight] += weights
            if module.endswith(GATES + UPS):
                (gates if module.endswith(GATES) else ups)[layer].add(fmt)
        elif fmt.along > 1:
            output = module.rpartition(".")[2]
            units[kind][output] = lcm(fmt.along, units[kind].get(output, 1))
    for (kind, _), (fmt, weights) in sums.items():
        counts[kind][fmt] += weights
    experts, shared, dense, embedding = (
        replace(_summed(counts[kind], kind == "experts"), outputs=tuple(units[kind].items())) for kind in KINDS
    )
    unread = ", ".join(filter(None, (experts.unread_by_gpu, _unlike(gates, ups))))
    experts = replace(experts, layers=_layer_means(by_layer), unread_by_gpu=unread)
    return StoredFormats(experts, shared, dense, embedding)


def _unlike(gates: Mapping[int, set[QuantFormat]], ups: Mapping[int, set[QuantFormat]]) -> str:
    """The first layer whose experts' gates and ups have different formats; "" where all are alike. GPU kernels take
    both as one matrix."""
    for layer in sorted(gates.keys() & ups.keys()):
        if gates[layer] != ups[layer]:
            each = (" and ".join(sorted(map(str, formats))) for formats in (gates[layer], ups[layer]))
            return f"gates and ups of two formats (layer {layer}: {', '.join(each)})"
    return ""


def _layer(module: str) -> int:
    """-1: its name has no number."""
    number = _LAYER.search(module)
    return int(number[1]) if number else -1


def _layer_means(by_layer: dict[int, Counter[float]]) -> tuple[float, ...]:
    """Bytes per weight of each layer's experts, in order; (): all layers have the same."""
    means = [
        sum(each * weights for each, weights in by_layer[layer].items()) / by_layer[layer].total()
        for layer in sorted(by_layer)
    ]
    return tuple(means) if len(set(means)) > 1 else ()


def _kind(module: str) -> str:
    if "shared_expert" in module:
        return "shared"
    if is_expert(module):
        return "experts"
    if module.endswith(NUMBERS) or is_table(f"{module}."):  # neither is computed from codes
        return "numbers"
    return "embedding" if module.endswith("embed_tokens") else "dense"


def _summed(counts: Counter[QuantFormat], experts: bool) -> StoredFormat:
    total = counts.total()
    if not total:
        return StoredFormat()
    largest = counts.most_common(1)[0][0]
    names = dict.fromkeys(str(fmt) for fmt, _ in counts.most_common())
    return StoredFormat(
        name=" + ".join(names),
        quantised=any(fmt.quantised for fmt in counts),
        bytes_per_weight=sum(fmt.bytes_per_weight * n for fmt, n in counts.items()) / total,
        methods=largest.methods,
        group=largest.group if len(names) == 1 else 0,
        along=lcm(*(fmt.along for fmt in counts)),
        decoded=", ".join(str(fmt) for fmt in counts if fmt.quantised and not fmt.packable),
        gpu_bytes_per_weight=sum(_gpu_bytes(fmt) * n for fmt, n in counts.items()) / total,
        shares=tuple((str(fmt), n / total) for fmt, n in counts.most_common()),
        zero_points=any(fmt.zero_points and fmt.packable for fmt in counts),
        unread_by_gpu=", ".join(
            str(fmt) for fmt in counts if not (fmt.gpu_expert if experts else fmt.gpu_readable)
        ),
    )


def _gpu_bytes(fmt: QuantFormat) -> float:
    """Per weight of a dense matrix."""
    return fmt.bytes_per_weight if fmt.quantised and fmt.gpu_readable else 2.0
