"""`QuantFormat`: how one matrix of a checkpoint is stored, as identity: compared, counted, printed; never computed."""

from __future__ import annotations

from dataclasses import dataclass

BITS = {
    "f32": 32, "f16": 16, "bf16": 16, "int8": 8, "fp8": 8, "mxfp8": 8, "int4": 4, "mxfp4": 4, "nvfp4": 4,
    "q4_0": 4, "q4_1": 4, "q5_0": 5, "q5_1": 5, "q8_0": 8, "q2_k": 2, "q3_k": 3, "q4_k": 4, "q5_k": 5, "q6_k": 6,
}  # fmt: skip
"""Kinds of stored numbers and their width. mx and nv kinds have a fixed group of 32 or 16; q kinds are GGUF's blocks,
which are described by their name alone."""

FLOATS = ("f32", "f16", "bf16")


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """One matrix [N, K] as stored.

    packing: whose names and bit order: "plain" (one tensor), "fp8" (DeepSeek, Qwen), "compressed-tensors", "gptq",
    "awq", "modelopt", "mxfp4" (gpt-oss), "deepseek" (V4's packed experts), "gguf".
    """

    kind: str  # a key of BITS
    packing: str = "plain"
    group: int = 0  # weights along K that share a scale; 0: all of them
    block_rows: int = 1  # rows that share a scale; 0: all of them
    scale: str = ""  # type of the scales, as safetensors spells it
    zero_points: bool = False
    ordered: bool = False  # rows of K were permuted before grouping (act-order)

    @property
    def quantised(self) -> bool:
        return self.kind not in FLOATS

    @property
    def bits(self) -> int:
        """Of one code, without scales."""
        return BITS[self.kind]

    def __str__(self) -> str:
        """As plans and messages show it: "fp8 128x128", "int4 g32 (gptq, zero points)"."""
        notes = [self.packing] if self.packing in ("gptq", "awq", "modelopt") else []
        notes += ["zero points"] if self.zero_points else []
        notes += ["act-order"] if self.ordered else []
        return f"{self.kind}{self._grouping()}" + (f" ({', '.join(notes)})" if notes else "")

    def _grouping(self) -> str:
        if not self.quantised or self.kind.startswith(("mx", "nv", "q")):
            return ""
        if self.group and self.block_rows > 1:
            return f" {self.block_rows}x{self.group}"
        if self.group:
            return f" g{self.group}"
        return " per tensor" if self.block_rows == 0 else " per channel"
