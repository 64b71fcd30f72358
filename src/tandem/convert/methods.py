"""The formats that `kt convert` writes, each as compressed-tensors spells it.

A method rounds rows of a matrix to named parts. Every part's first dimension is the matrix's rows, so parts of row
ranges are written where they belong, in any order; `weight_shape`, the exception, does not come from weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.errors import ConfigError
from tandem.formats import rounding
from tandem.formats.codes import join_nibbles
from tandem.kernels.fit import fit_groups

GROUPS = (32, 64, 128)


class StoredPart(NamedTuple):
    """A stored tensor: safetensors' name of its type, and its shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Method:
    """`scheme` is what quantization_config says of the weights, `format` which of its storage formats this is."""

    name: str
    format: str
    group: int  # 0: one scale per row
    scheme: Mapping[str, Any]
    parts: Callable[[int, int], dict[str, StoredPart]]  # of a matrix [N, K], by the suffix of the module's name
    rounded: Callable[[Tensor], dict[str, Tensor]]  # rows float32 [n, K] → the same parts of these rows
    grid: rounding.IntegerGrid | None = None  # of integer codes
    activations: Mapping[str, Any] | None = None

    def check(self, module: str, columns: int) -> None:
        """Raises ConfigError when the groups do not fit a matrix of so many input columns."""
        if self.group and columns % self.group:
            fitting = [str(g) for g in GROUPS if columns % g == 0 and self.name.startswith("INT")]
            advice = f"take --group {fitting[-1]}" if fitting else "take --method FP8"
            raise ConfigError(f"{module} has {columns} input columns, no multiple of {self.group}: {advice}")


OTHER_NAMES = {"AMXINT4": "INT4", "AMXINT8": "INT8", "MOE_INT4": "INT4", "MOE_INT8": "INT8"}
"""As KTransformers' converter calls them: it writes layouts of its own kernels, we write what every engine reads."""


def usual_name(name: str) -> str:
    """Usual name of a method, however it is spelt."""
    return OTHER_NAMES.get(name.upper(), name.upper())


def method_named(name: str, group: int) -> Method:
    """Raises ConfigError naming the methods and groups that exist."""
    if name not in METHODS:
        raise ConfigError(f"--method {name!r} does not exist; these do: {', '.join(METHODS)}")
    if group not in GROUPS:
        raise ConfigError(f"--group {group} does not exist; these do: {', '.join(map(str, GROUPS))}")
    return METHODS[name](group)


def _integers(name: str, bits: int, grid: rounding.IntegerGrid) -> Callable[[int], Method]:
    def make(group: int) -> Method:
        def parts(n: int, k: int) -> dict[str, StoredPart]:
            return {
                "weight_packed": StoredPart("I32", (n, -(-k * bits // 32))),
                "weight_scale": StoredPart("BF16", (n, k // group)),
                "weight_shape": StoredPart("I64", (2,)),
            }

        def rounded(rows: Tensor) -> dict[str, Tensor]:
            return integer_parts(*fit_groups(rows, grid, group), bits)

        scheme = _scheme("int", bits, strategy="group", group_size=group)
        return Method(name, "pack-quantized", group, scheme, parts, rounded, grid)

    return make


def integer_parts(codes: Tensor, scales: Tensor, bits: int) -> dict[str, Tensor]:
    """int8 codes [n, K] and bfloat16 scales [n, K / group] as pack-quantized stores them."""
    return {"weight_packed": packed(codes, bits), "weight_scale": scales}


def packed(codes: Tensor, bits: int) -> Tensor:
    """int8 codes [n, K] → int32 [n, ceil(K * bits / 32)], offset by half the range, the first k in the lowest bits."""
    unsigned = (codes.view(torch.uint8) + (1 << bits - 1)) & ((1 << bits) - 1)
    small = join_nibbles(unsigned) if bits == 4 else unsigned
    return torch.nn.functional.pad(small, (0, -small.shape[1] % 4)).view(torch.int32)


def _mxfp4(_group: int) -> Method:
    def parts(n: int, k: int) -> dict[str, StoredPart]:
        return {"weight_packed": StoredPart("U8", (n, k // 2)), "weight_scale": StoredPart("U8", (n, k // 32))}

    def rounded(rows: Tensor) -> dict[str, Tensor]:
        codes, scales = rounding.fit_mxfp4(rows)
        return {"weight_packed": codes, "weight_scale": scales}

    scheme = _scheme("float", 4, strategy="group", group_size=32, scale_dtype="torch.uint8")
    return Method("MXFP4", "mxfp4-pack-quantized", 32, scheme, parts, rounded)


def _fp8(_group: int) -> Method:
    def parts(n: int, k: int) -> dict[str, StoredPart]:
        return {"weight": StoredPart("F8_E4M3", (n, k)), "weight_scale": StoredPart("F32", (n, 1))}

    def rounded(rows: Tensor) -> dict[str, Tensor]:
        codes, scales = rounding.fit_fp8(rows)
        return {"weight": codes, "weight_scale": scales}

    # Engines that have no fp8 weights without fp8 activations read this; Tandem keeps activations in bf16.
    activations = _scheme("float", 8, strategy="token") | {"dynamic": True}
    return Method(
        "FP8",
        "float-quantized",
        0,
        _scheme("float", 8, strategy="channel"),
        parts,
        rounded,
        activations=activations,
    )


def _scheme(kind: str, bits: int, **more: object) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False, **more}


METHODS: dict[str, Callable[[int], Method]] = {
    "INT4": _integers("INT4", 4, rounding.INT4),
    "INT8": _integers("INT8", 8, rounding.INT8),
    "MXFP4": _mxfp4,
    "FP8": _fp8,
}
