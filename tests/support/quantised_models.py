"""Tiny models with quantised matrices, each beside a plain directory that holds the numbers they stand for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

import stored_formats as formats
from tandem.machine.machine import TIERS, Core, Machine
from tiny import file_tensors, settings

Choice = Callable[[str], str | None]
"""A matrix's module → its format, a key of `stored_formats.MAKERS`; None: it stays as it is."""


def is_matrix(name: str, tensor: Tensor) -> bool:
    """Routers, embeddings and heads are never quantised in the checkpoints that people have."""
    return (
        tensor.dim() == 2
        and not name.startswith(("model.embed", "lm_head"))
        and not name.endswith(("gate.weight", "bias"))
    )


def experts_only(fmt: str) -> Choice:
    return lambda module: fmt if ".experts." in module else None


def everything(fmt: str) -> Choice:
    return lambda module: fmt


def save_quantised(
    source: Path, target: Path, choice: Choice, *, with_config: bool = True
) -> tuple[Path, Path]:
    """(the quantised directory, the plain float32 one)."""
    quantised, plain, configs = {}, {}, {}
    for name, tensor in file_tensors(source).items():
        module = name.removesuffix(".weight")
        fmt = choice(module) if is_matrix(name, tensor) else None
        if fmt is None:
            quantised[name] = plain[name] = tensor
            continue
        made = formats.MAKERS[fmt](tensor.float())
        quantised |= {module + suffix: part for suffix, part in made.tensors.items()}
        plain[name], configs[fmt] = made.expected, made.config
    quantization = _merged(configs) if with_config else None
    return _save(source, target / "quantised", quantised, quantization), _save(
        source, target / "plain", plain, None
    )


def save_experts(source: Path, target: Path, fmt: str) -> Path:
    """Routed experts in a format of `stored_formats.MAKERS`, without the plain ones: less memory for a real model."""
    tensors, config = {}, dict[str, object]()
    for name, tensor in file_tensors(source).items():
        if ".experts." in name and is_matrix(name, tensor):
            made = formats.MAKERS[fmt](tensor.float())
            tensors |= {name.removesuffix(".weight") + suffix: part for suffix, part in made.tensors.items()}
            config = made.config
        else:
            tensors[name] = tensor
    return _save(source, target, tensors, config)


def _merged(configs: dict[str, dict[str, object]]) -> dict[str, object]:
    """fp8 beside int4 is written as `linear_fp8_config`."""
    both = list(configs.values())
    first = next((c for c in both if c["quant_method"] != "fp8"), both[0])
    fp8 = next((c for c in both if c["quant_method"] == "fp8"), None)
    return first if fp8 is None or fp8 is first else {**first, "linear_fp8_config": fp8}


def _save(
    source: Path, target: Path, tensors: dict[str, Tensor], quantization: dict[str, object] | None
) -> Path:
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix == ".json" and not file.name.endswith("index.json"):
            shutil.copy(file, target)
    config = json.loads((target / "config.json").read_text())
    if quantization:
        config["quantization_config"] = quantization
    (target / "config.json").write_text(json.dumps(config))
    tensors = {k: v.contiguous().clone() for k, v in tensors.items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def save_deepseek_names(source: Path, target: Path) -> Path:
    """The same tensors under DeepSeek's inference names."""
    renamed = {deepseek_name(k): v for k, v in file_tensors(source).items()}
    config = json.loads((source / "config.json").read_text())
    return _save(source, target, renamed, config.get("quantization_config"))


_DEEPSEEK = (
    ("model.embed_tokens.", "embed."), ("lm_head.", "head."), ("model.", ""), ("self_attn.", "attn."),
    ("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm"), ("mlp.", "ffn."),
    (".q_proj.", ".wq."), (".k_proj.", ".wk."), (".v_proj.", ".wv."), (".o_proj.", ".wo."),
    (".q_a_proj.", ".wq_a."), (".q_b_proj.", ".wq_b."), (".kv_a_proj_with_mqa.", ".wkv_a."),
    (".kv_b_proj.", ".wkv_b."), (".q_a_layernorm.", ".q_norm."), (".kv_a_layernorm.", ".kv_norm."),
    (".gate_proj.", ".w1."), (".down_proj.", ".w2."), (".up_proj.", ".w3."),
    ("gate.e_score_correction_bias", "gate.bias"), ("weight_scale_inv", "scale"),
)  # fmt: skip


def deepseek_name(name: str) -> str:
    for ours, theirs in _DEEPSEEK:
        name = name.replace(ours, theirs)
    return name


MACHINE = Machine("Test CPU", (Core(0, 0, 0),), TIERS[:2], 64 << 30, 64 << 30, None)


BLOCKS = settings(
    hidden_size=128, num_hidden_layers=2, moe_intermediate_size=128, intermediate_size=256, num_attention_heads=8,
    num_key_value_heads=4, head_dim=32, n_routed_experts=8, n_group=2, topk_group=1,
)  # fmt: skip
"""Multiples of 128: every format's blocks fit."""


def mixed(module: str) -> str:
    return "int4 packed g32" if ".experts." in module else "fp8 blocks"


CHOICES = {
    "all fp8": everything("fp8 blocks"),
    "all fp8 per channel": everything("fp8 per channel"),
    "all int8": everything("int8 per channel"),
    "all gptq": everything("gptq"),
    "all awq": everything("awq"),
    "all mxfp4": everything("mxfp4 packed"),
    "experts int4": experts_only("int4 packed g32"),
    "experts mxfp4": experts_only("mxfp4 deepseek"),
    "experts nvfp4": experts_only("nvfp4 modelopt"),
    "experts nvfp4 packed": experts_only("nvfp4 packed"),
    "all mxfp8": everything("mxfp8 inverse"),
    "experts mxfp8": experts_only("mxfp8 modelopt"),
    "fp8 + int4": mixed,
}
