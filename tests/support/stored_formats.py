"""One quantised matrix in every format that checkpoints have, beside the numbers an independent decoder reads from it.

Decoders: `compressed-tensors`, Transformers' fp8 and mxfp4 code, and for GPTQ and AWQ the definitions written out
(as AutoGPTQ and AutoAWQ have them). None of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

FP8 = torch.float8_e4m3fn


@dataclass
class Made:
    """tensors by what follows the module's name; `expected` float32 [N, K]; `config`: quantization_config."""

    tensors: dict[str, Tensor]
    expected: Tensor
    config: dict[str, object] = field(default_factory=dict)
    needs_config: bool = False  # tensors alone do not say it


def _scheme(**weights: object) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))


def _compressed(weight: Tensor, fmt: str, args: dict[str, object], **qparams: Tensor) -> Made:
    """Compressed and decompressed by the library; scales in float32 when decoding, so that products do not round."""
    library, scheme = BaseCompressor.get_value_from_registry(fmt), _scheme(**args)
    stored = library.compress({"weight": weight, **qparams}, scheme)
    exact = {k: v.float() if k == "weight_scale" and v.dtype in (torch.bfloat16, torch.float16) else v
             for k, v in stored.items()}  # fmt: skip
    config = {"quant_method": "compressed-tensors", "format": fmt, "ignore": ["lm_head"],
              "config_groups": {"group_0": {"targets": ["Linear"], "weights": args}}}  # fmt: skip
    expected = library.decompress(exact, scheme)["weight"].float()
    return Made({f".{k}": v for k, v in stored.items()}, expected, config)


def _extremes(weight: Tensor, group: int) -> Tensor:
    return weight.unflatten(1, (-1, group)).abs().amax(-1)


def packed_int(
    weight: Tensor, bits: int, group: int, dtype: torch.dtype = torch.bfloat16, **more: object
) -> Made:
    scale = (_extremes(weight, group or weight.shape[1]) / (2 ** (bits - 1) - 1)).to(dtype)
    args = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    if not group:
        args |= {"strategy": "channel", "group_size": None}
    return _compressed(weight, "pack-quantized", args, weight_scale=scale, **more)


def packed_int_zeros(weight: Tensor, bits: int) -> Made:
    groups = weight.unflatten(1, (-1, 32))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = ((high - low) / (2**bits - 1)).to(torch.bfloat16)
    zero = (-(2 ** (bits - 1)) - (low / scale.float()).round()).clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    args = {"num_bits": bits, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
    return _compressed(
        weight, "pack-quantized", args, weight_scale=scale, weight_zero_point=zero.to(torch.int8)
    )


def int8(weight: Tensor, strategy: str) -> Made:
    args: dict[str, object] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": strategy}
    extreme = weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().max()[None]
    return _compressed(weight, "int-quantized", args, weight_scale=extreme / 127)


def int4_bytes(weight: Tensor) -> Made:
    """W4AFP8 (written out): two's complement codes of 4 bits, even columns in low halves, scales of 128 columns."""
    scale = (_extremes(weight, 128) / 7).to(torch.bfloat16).float()
    codes = (weight / scale.repeat_interleave(128, 1)).round().clamp(-8, 7)
    low, high = codes[:, ::2].to(torch.int64) & 15, codes[:, 1::2].to(torch.int64) & 15
    joined = (low | high << 4).to(torch.uint8).view(torch.int8)
    expected = codes * scale.repeat_interleave(128, 1)
    tensors = {".weight": joined, ".weight_scale_inv": scale.to(torch.bfloat16)}
    return Made(tensors, expected, {"quant_method": "w4afp8", "weight_block_size": [128, 128]})


def float8(weight: Tensor, strategy: str) -> Made:
    args: dict[str, object] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    extreme = weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().max()[None]
    return _compressed(weight, "float-quantized", args, weight_scale=(extreme / 448).to(torch.bfloat16))


def mx(weight: Tensor, bits: int) -> Made:
    scale = torch.exp2((_extremes(weight, 32) / (6 if bits == 4 else 448)).log2().ceil())
    args = {"num_bits": bits, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32,
            "scale_dtype": "torch.uint8"}  # fmt: skip
    return _compressed(
        weight, "mxfp4-pack-quantized" if bits == 4 else "mxfp8-quantized", args, weight_scale=scale
    )


def mxfp8_modelopt(weight: Tensor) -> Made:
    return Made(mx(weight, 8).tensors, mx(weight, 8).expected, {"quant_method": "modelopt", "quant_algo": "MXFP8"})


def mxfp8_inverse(weight: Tensor) -> Made:
    """As SGLang's own quantiser names scales, which are bytes of exponents."""
    made = mx(weight, 8)
    tensors = {".weight": made.tensors[".weight"], ".weight_scale_inv": made.tensors[".weight_scale"]}
    config = {"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32]}
    return Made(tensors, made.expected, config)


def nvfp4_compressed(weight: Tensor) -> Made:
    whole = (6 * 448 / weight.abs().max())[None]
    scale = (_extremes(weight, 16) / 6 * whole).to(FP8)
    args = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    made = _compressed(
        weight, "nvfp4-pack-quantized", args, weight_scale=scale.float(), weight_global_scale=whole
    )
    numbers = unpack_fp4_from_uint8(made.tensors[".weight_packed"], *weight.shape, torch.float32)
    made.expected = dequantize(  # the compressor's own decompress rounds to bfloat16
        x_q=numbers,
        scale=scale.float(),
        args=QuantizationArgs(**args),
        global_scale=whole,
        dtype=torch.float32,
    )
    return made


def nvfp4_modelopt(weight: Tensor) -> Made:
    made = nvfp4_compressed(weight)
    codes, scale = made.tensors[".weight_packed"], made.tensors[".weight_scale"]
    whole = (weight.abs().max() / (6 * 448)).float()
    numbers = unpack_fp4_from_uint8(codes, weight.shape[0], weight.shape[1], torch.float32)
    expected = numbers * (scale.float() * whole).repeat_interleave(16, 1)
    tensors = {
        ".weight": codes,
        ".weight_scale": scale,
        ".weight_scale_2": whole,
        ".input_scale": torch.ones(()),
    }
    config = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    }
    return Made(tensors, expected, config)


def fp8_blocks(weight: Tensor, size: int = 128, power: bool = False) -> Made:
    n, k = weight.shape
    blocks = weight.view(n // size, size, k // size, size)
    scale = blocks.abs().amax((1, 3)) / 448
    if power:
        scale = torch.exp2(scale.log2().ceil()).to(torch.float8_e8m0fnu)
    codes = (blocks / scale.float()[:, None, :, None]).to(FP8).view(n, k)
    expected = Fp8Dequantize(None)._dequantize_one(codes, scale, torch.float32)
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [size, size]}
    return Made({".weight": codes, ".weight_scale_inv": scale}, expected, config, needs_config=size != 128)


def fp4_deepseek(weight: Tensor) -> Made:
    """V4's experts: e2m1 in int8, e8m0 scales."""
    made = mx(weight, 4)
    codes = made.tensors[".weight_packed"].view(torch.int8)
    scale = made.tensors[".weight_scale"].view(torch.float8_e8m0fnu)
    expected = Fp8Dequantize(None)._dequantize_one(codes, scale, torch.float32)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    return Made({".weight": codes, ".weight_scale_inv": scale}, expected, config)


def fp4_gpt_oss(weight: Tensor) -> Made:
    """Fused only: blocks [N, K / 32, 16]."""
    made = mx(weight, 4)
    blocks = made.tensors[".weight_packed"].view(weight.shape[0], -1, 16)
    scales = made.tensors[".weight_scale"]
    expected = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0].T.contiguous()
    return Made({"_blocks": blocks, "_scales": scales}, expected, {"quant_method": "mxfp4"})


def _words(codes: Tensor, bits: int, order: tuple[int, ...]) -> Tensor:
    """[rows, n] → int32 [rows, n / (32 / bits)]: code order[i] of each word at bit bits * i, one number at a time."""
    per = 32 // bits
    words = torch.zeros(codes.shape[0], codes.shape[1] // per, dtype=torch.int64)
    for i, place in enumerate(order):
        words |= codes[:, place::per].long() << bits * i
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _grid(weight: Tensor, group: int, bits: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K] from 0, scales and zero points [N, groups]."""
    groups, top = weight.unflatten(1, (-1, group)), 2**bits - 1
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / top).half()
    zeros = (
        torch.full_like(low, (top + 1) // 2) if symmetric else (-low / scales.float()).round().clamp(1, top)
    )
    codes = ((groups / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, top)
    return codes.flatten(1), scales, zeros


def gptq(
    weight: Tensor, bits: int = 4, symmetric: bool = True, version: int = 1, act_order: bool = False
) -> Made:
    group, k = 32, weight.shape[1]
    order = torch.arange(k) // group
    if act_order:
        order = order[torch.randperm(k, generator=torch.Generator().manual_seed(1))]
    together = order.argsort(stable=True)  # inputs of one group side by side
    sorted_codes, scales, zeros = _grid(weight[:, together], group, bits, symmetric)
    codes = torch.empty_like(sorted_codes)
    codes[:, together] = sorted_codes
    plain = tuple(range(32 // bits))
    tensors = {
        ".qweight": _words(codes, bits, plain).T.contiguous(),
        ".qzeros": _words(zeros.T - (2 - version), bits, plain),
        ".scales": scales.T.contiguous(),
        ".g_idx": order.int(),
    }
    expected = scales.float()[:, order] * (codes - zeros[:, order])
    config: dict[str, object] = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order,
              "sym": symmetric, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}  # fmt: skip
    return Made(tensors, expected, config, needs_config=not symmetric)


def awq(weight: Tensor) -> Made:
    group = 32
    codes, scales, zeros = _grid(weight, group, 4, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        ".qweight": _words(codes.T.contiguous(), 4, order),
        ".qzeros": _words(zeros.T.contiguous(), 4, order),
        ".scales": scales.T.contiguous(),
    }
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    spread = torch.arange(weight.shape[1]) // group
    return Made(tensors, scales.float()[:, spread] * (codes - zeros[:, spread]), config)


MAKERS: dict[str, Callable[[Tensor], Made]] = {
    "fp8 blocks": fp8_blocks,
    "fp8 blocks of 64": lambda w: fp8_blocks(w, 64),
    "fp8 blocks, e8m0 scales": lambda w: fp8_blocks(w, power=True),
    "fp8 per channel": lambda w: float8(w, "channel"),
    "fp8 per tensor": lambda w: float8(w, "tensor"),
    "mxfp8": lambda w: mx(w, 8),
    "mxfp8 modelopt": mxfp8_modelopt,
    "mxfp8 inverse": mxfp8_inverse,
    "int8 per channel": lambda w: int8(w, "channel"),
    "int8 per tensor": lambda w: int8(w, "tensor"),
    "int8 packed g128": lambda w: packed_int(w, 8, 128),
    "int8 packed zeros": lambda w: packed_int_zeros(w, 8),
    "int4 packed g32": lambda w: packed_int(w, 4, 32),
    "int4 packed g128 f16": lambda w: packed_int(w, 4, 128, torch.float16),
    "int4 packed per channel": lambda w: packed_int(w, 4, 0),
    "int4 packed zeros": lambda w: packed_int_zeros(w, 4),
    "int4 bytes": int4_bytes,
    "mxfp4 packed": lambda w: mx(w, 4),
    "mxfp4 deepseek": fp4_deepseek,
    "nvfp4 packed": nvfp4_compressed,
    "nvfp4 modelopt": nvfp4_modelopt,
    "gptq": gptq,
    "gptq v2": lambda w: gptq(w, version=2),
    "gptq zeros": lambda w: gptq(w, symmetric=False),
    "gptq v2 zeros": lambda w: gptq(w, symmetric=False, version=2),
    "gptq int8": lambda w: gptq(w, 8),
    "gptq int8 zeros": lambda w: gptq(w, 8, symmetric=False),
    "gptq act-order": lambda w: gptq(w, act_order=True),
    "gptq act-order zeros": lambda w: gptq(w, symmetric=False, act_order=True),
    "awq": awq,
}
SPELLINGS = {  # of what follows a module's name: DeepSeek's inference names, fused 3-D tensors
    "hugging face": {},
    "deepseek": {".weight_scale_inv": ".scale"},
    "fused": {".weight": "", ".weight_scale_inv": "_scale_inv", ".weight_scale": "_scale",
              ".weight_scale_2": "_scale_2", ".weight_packed": "_packed", ".weight_global_scale": "_global_scale",
              ".weight_zero_point": "_zero_point"},
}  # fmt: skip
