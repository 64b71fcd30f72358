"""What the GPU kernels read of what the CPU kernels pack. The planner asks here before anything is loaded
(`QuantFormat.gpu_readable`), the kernels once they see packed bytes (`kernels/gpu/panels.py`)."""

from __future__ import annotations

GPU_CODES = ("bf16", "int8", "int4", "fp8", "fp4")
EXPERT_CODES = (*GPU_CODES, "uint4")  # the last one with zero points
GPU_SCALES = ("f32", "bf16", "f16", "e8m0", "e4m3")

MMA_CODES = ("int8", "int4", "fp8", "fp4")  # that few rows take to tensor cores
MMA_SCALES = ("f32", "bf16", "f16", "e8m0")
MMA_GROUPS = (0, 32, 64, 128, 256)  # k per scale; 0: one per row
MMA_STEP = 32  # k of two mma

PACKED_KINDS = {
    "int8": ("int8", ""), "int4": ("int4", ""), "fp8": ("fp8", ""),
    "mxfp8": ("fp8", "e8m0"), "mxfp4": ("fp4", "e8m0"), "nvfp4": ("fp4", "e4m3"),
    "q4_0": ("int4", "f16"), "q4_1": ("uint4", "f16"), "q5_0": ("int6", "f16"), "q5_1": ("int6", "f16"),
    "q8_0": ("int8", "f16"), "q2_k": ("uint4", "bytes16"), "q3_k": ("int4", "bytes16"),
    "q4_k": ("uint4", "bytes8"), "q5_k": ("int6", "bytes8"), "q6_k": ("int6", "bytes16"),
}  # fmt: skip
"""Kind of `QuantFormat` → codes and scales as packed; "": scales of a type of their own, all of which are read."""


def refusal(codes: str, scale: str, depth: int = 0, zeros: bool = False) -> str:
    """Why experts of these packed codes, scales and number of inputs are not read; "" when they are. zeros: they have
    zero points."""
    if (codes == "uint4") != zeros:
        return f"the GPU kernels do not read {codes} experts with{'' if zeros else 'out'} zero points"
    if codes not in EXPERT_CODES:
        return f"the GPU kernels do not read {codes} experts; they read {', '.join(GPU_CODES)}"
    if scale and scale not in GPU_SCALES:
        return f"the GPU kernels do not read {scale} scales; they read {', '.join(GPU_SCALES)}"
    return f"the GPU kernels read k in pairs: a depth of {depth} is odd" if depth % 2 else ""


def kind_is_read(kind: str, shifted: bool, experts: bool = False) -> bool:
    """Of a stored kind that is packed as it is. shifted: with zero points, which kernels of experts subtract from codes
    of 4 bits."""
    if shifted:
        return experts and kind == "int4"
    return not refusal(*PACKED_KINDS[kind])


def takes_tensor_cores(codes: str, scale: str, group: int, depth: int, padded_depth: int) -> bool:
    """Whether there is code for few rows of such panels: whole groups of 32 k, rows of x in units of 16 bytes."""
    known = codes in MMA_CODES and scale in MMA_SCALES
    return known and group in MMA_GROUPS and padded_depth % MMA_STEP == depth % 8 == 0
