"""Packed formats of the CPU kernels that the GPU kernels read. The planner asks here before anything is loaded
(`QuantFormat.gpu_readable`), the kernels once they see packed bytes (`kernels/gpu/panels.py`)."""

from __future__ import annotations

GPU_CODES = ("bf16", "int8", "int4", "fp8", "fp4")
CODEBOOKS = ("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1")
EXPERT_CODES = (*GPU_CODES, "uint4", "int6", "uint2", "int3", "nl4", *CODEBOOKS)
GPU_SCALES = ("f32", "bf16", "f16", "e8m0", "e4m3")
EXPERT_SCALES = (*GPU_SCALES, "bytes8", "bytes16", "nibbles16", "odd8", "odd16")
SHIFTS = {"zeros": "zero points", "offsets": "offsets"}  # what may stand behind a scale type and "+"

MMA_CODES = ("int8", "int4", "fp8", "fp4")  # that few rows take to tensor cores
MMA_SCALES = ("f32", "bf16", "f16", "e8m0")
MMA_GROUPS = (0, 32, 64, 128, 256)  # k per scale; 0: one per row
MMA_STEP = 32  # k of two mma
PLAIN_CODES = "bf16"  # that is no code, and that some rows of an expert take to tensor cores as it is

PACKED_KINDS = {
    "int8": ("int8", ""), "int4": ("int4", ""), "fp8": ("fp8", ""),
    "mxfp8": ("fp8", "e8m0"), "mxfp4": ("fp4", "e8m0"), "nvfp4": ("fp4", "e4m3"),
    "q4_0": ("int4", "f16"), "q4_1": ("uint4", "f16+offsets"), "q5_0": ("int6", "f16"),
    "q5_1": ("int6", "f16+offsets"), "q8_0": ("int8", "f16"), "q2_k": ("uint2", "nibbles16+offsets"),
    "q3_k": ("int3", "bytes16"), "q4_k": ("uint4", "bytes8+offsets"), "q5_k": ("int6", "bytes8+offsets"),
    "q6_k": ("int6", "bytes16"), "iq4_nl": ("nl4", "f16"), "iq4_xs": ("nl4", "bytes8"),
    "q2_0": ("uint2", "f16+zeros"), "tq2_0": ("uint2", "f16+zeros"),
    "iq1_s": ("iq1", "odd8"), "iq1_m": ("iq1", "odd16"),
    "iq2_xxs": ("iq2_xxs", "odd8"), "iq2_xs": ("iq2_xs", "odd16"), "iq2_s": ("iq2_s", "odd16"),
    "iq3_xxs": ("iq3_xxs", "odd8"), "iq3_s": ("iq3_s", "odd8"),
}  # fmt: skip
"""Kind of `QuantFormat` → codes and scales as packed; "": scales of a type of their own, all of which are read."""


def refusal(codes: str, scales: str, depth: int = 0, experts: bool = True) -> str:
    """Why experts, or else dense matrices, of these packed codes, scales and number of inputs are not read; "" when
    they are."""
    what = "experts" if experts else "dense matrices"
    known, types = (EXPERT_CODES, EXPERT_SCALES) if experts else (GPU_CODES, GPU_SCALES)
    scale, _, shift = scales.partition("+")
    if codes not in known:
        return f"the GPU kernels do not read {codes} {what}; they read {', '.join(known)}"
    if scale and scale not in types:
        return f"the GPU kernels do not read {scale} scales of {what}; they read {', '.join(types)}"
    if shift and not experts:
        return f"the GPU kernels do not read {what} with {SHIFTS[shift]}"
    return f"the GPU kernels read k in pairs: a depth of {depth} is odd" if depth % 2 else ""


def kind_is_read(kind: str, shifted: bool, experts: bool = False) -> bool:
    """Whether GPU kernels read a stored kind that is packed as it is.

    shifted: with zero points; codes of 4 bits are then unsigned.
    """
    codes, scales = PACKED_KINDS[kind]
    if shifted:
        codes, scales = "uint4" if codes == "int4" else codes, f"{scales}+zeros"
    return not refusal(codes, scales, experts=experts)


def takes_tensor_cores(codes: str, scale: str, group: int, depth: int, padded_depth: int) -> bool:
    """Whether there is code for few rows of such panels: whole groups of 32 k, rows of x in units of 16 bytes."""
    known = codes in MMA_CODES and scale in MMA_SCALES
    return known and group in MMA_GROUPS and padded_depth % MMA_STEP == depth % 8 == 0


def is_plain_steps(codes: str, depth: int, padded_depth: int) -> bool:
    """True for panels of bfloat16 without scales, in whole steps of MMA_STEP k, with a depth in units of 16 bytes."""
    return codes == PLAIN_CODES and padded_depth % MMA_STEP == depth % 8 == 0
