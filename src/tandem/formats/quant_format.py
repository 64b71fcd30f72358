"""`QuantFormat`: how one matrix of a checkpoint is stored, as identity: compared, counted, printed; never computed."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.formats.gpu_reading import kind_is_read

BITS = {
    "f32": 32, "f16": 16, "bf16": 16, "int8": 8, "fp8": 8, "mxfp8": 8, "int4": 4, "mxfp4": 4, "nvfp4": 4,
    "q4_0": 4, "q4_1": 4, "q5_0": 5, "q5_1": 5, "q8_0": 8, "q2_k": 2, "q3_k": 3, "q4_k": 4, "q5_k": 5, "q6_k": 6,
    "iq1_s": 1, "iq1_m": 1, "iq2_xxs": 2, "iq2_xs": 2, "iq2_s": 2, "iq3_xxs": 3, "iq3_s": 3, "iq4_nl": 4, "iq4_xs": 4,
    "q2_0": 2, "tq2_0": 2,
}  # fmt: skip
"""Kinds of stored numbers and their width. mx and nv kinds have a fixed group of 32 or 16; q, iq and tq kinds are
GGUF's blocks, which are described by their name alone."""

GGUF_BYTES = {
    "mxfp4": 0.53125, "q4_0": 0.5625, "q4_1": 0.625, "q5_0": 0.8125, "q5_1": 0.875, "q8_0": 1.0625,
    "q2_k": 0.328125, "q3_k": 0.4453125, "q4_k": 0.578125, "q5_k": 0.828125, "q6_k": 0.8203125,
    "iq1_s": 0.2109375, "iq1_m": 0.2265625, "iq2_xxs": 0.2734375, "iq2_xs": 0.2890625, "iq2_s": 0.3203125,
    "iq3_xxs": 0.3984375, "iq3_s": 0.4296875, "iq4_nl": 0.5625, "iq4_xs": 0.5390625, "tq2_0": 0.26171875,
    "q2_0": 0.296875, "nvfp4": 0.5625,
}  # fmt: skip
"""Bytes per weight of GGUF's blocks, once packed."""
GGUF_FILE_BYTES = {
    "mxfp4": 17 / 32, "q4_0": 18 / 32, "q4_1": 20 / 32, "q5_0": 22 / 32, "q5_1": 24 / 32, "q8_0": 34 / 32,
    "q2_k": 84 / 256, "q3_k": 110 / 256, "q4_k": 144 / 256, "q5_k": 176 / 256, "q6_k": 210 / 256,
    "iq1_s": 50 / 256, "iq1_m": 56 / 256, "iq2_xxs": 66 / 256, "iq2_xs": 74 / 256, "iq2_s": 82 / 256,
    "iq3_xxs": 98 / 256, "iq3_s": 110 / 256, "iq4_nl": 18 / 32, "iq4_xs": 136 / 256, "tq2_0": 66 / 256,
    "q2_0": 18 / 64, "nvfp4": 36 / 64,
}  # fmt: skip
"""As they are in the file."""
SCALE_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1, "F8_E8M0": 1, "F8_E4M3": 1}

_METHODS = {
    "f32": ("BF16",), "f16": ("BF16",), "bf16": ("BF16",), "fp8": ("FP8",), "mxfp8": ("FP8",),
    "int8": ("INT8", "AMXINT8"), "int4": ("RAWINT4", "INT4", "AMXINT4"), "mxfp4": ("MXFP4",), "nvfp4": ("NVFP4",),
}  # fmt: skip
SMALL_BLOCKS = ("mxfp4", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl")  # of 32 weights; others have 256
FLOATS = ("f32", "f16", "bf16")
CUT_GROUP = 64  # weights along K: larger groups of codes may be cut into such ones, with the same scale each


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
    def along(self) -> int:
        """Weights along K that belong together: a cut between them would leave no codes."""
        if not self.quantised or self.ordered:
            return 1
        if self.packing == "gguf":
            return 64 if self.kind in ("nvfp4", "q2_0") else 32 if self.kind in SMALL_BLOCKS else 256
        if self.group > CUT_GROUP and self.group % CUT_GROUP == 0:
            return CUT_GROUP
        return self.group or 32 // self.bits

    @property
    def bits(self) -> int:
        """Bits of one code, without scales."""
        return BITS[self.kind]

    @property
    def packable(self) -> bool:
        """Whether kernels have a form that holds it exactly; else it becomes numbers."""
        if self.packing == "gguf":
            return True
        return not (self.ordered or self.group % 16)

    @property
    def gpu_readable(self) -> bool:
        """Whether the GPU kernels read it as it is packed; numbers they do."""
        if not self.quantised or not self.packable:
            return True
        return kind_is_read(self.kind, self.zero_points)

    @property
    def gpu_expert(self) -> bool:
        """Whether those of experts do, which know zero points."""
        if not self.quantised or not self.packable:
            return True
        return kind_is_read(self.kind, self.zero_points, experts=True)

    @property
    def bytes_per_weight(self) -> float:
        """Once packed as it is: codes, and a scale for every group of every row."""
        if self.packing == "gguf" and self.quantised:
            return GGUF_BYTES[self.kind]
        if not self.quantised:
            return 2.0 if self.bits == 16 else 4.0
        if not self.packable:
            return 2.0
        widened = self.scale == "F16" and self.kind == "fp8"
        scale = 4 if widened else SCALE_BYTES.get(self.scale, 4)
        return self.bits / 8 + ((scale + self.zero_points) / self.group if self.group else 0)

    @property
    def file_bytes_per_weight(self) -> float:
        """As the checkpoint has it, but for what a whole row or matrix shares."""
        if self.packing == "gguf" and self.quantised:
            return GGUF_FILE_BYTES[self.kind]
        if not self.quantised or not self.group or not self.block_rows:
            return self.bits / 8
        zero = self.bits / 8 if self.zero_points else 0
        return self.bits / 8 + (SCALE_BYTES.get(self.scale, 4) + zero) / (self.group * self.block_rows)

    @property
    def methods(self) -> tuple[str, ...]:
        """Users' names of the format: values of --kt-method."""
        if self.packing == "gptq" and self.kind == "int4":
            return ("GPTQ_INT4", "INT4")
        if self.packing == "gguf" and self.quantised:
            return ("GGUF",)
        if self.packing == "awq":
            return ("AWQ", "INT4")
        if self.kind == "fp8" and self.group == 0:
            return ("FP8_PERCHANNEL", "FP8")
        return _METHODS[self.kind]

    def __str__(self) -> str:
        """As plans and messages show it: "fp8 128x128", "int4 g32 (gptq, zero points)"."""
        notes = [self.packing] if self.packing in ("gptq", "awq", "modelopt") else []
        notes += ["zero points"] if self.zero_points else []
        notes += ["act-order"] if self.ordered else []
        return f"{self.kind}{self._grouping()}" + (f" ({', '.join(notes)})" if notes else "")

    def _grouping(self) -> str:
        if not self.quantised or self.kind.startswith(("mx", "nv", "q", "iq", "tq")):
            return ""
        if self.group and self.block_rows > 1:
            return f" {self.block_rows}x{self.group}"
        if self.group:
            return f" g{self.group}"
        return " per tensor" if self.block_rows == 0 else " per channel"
