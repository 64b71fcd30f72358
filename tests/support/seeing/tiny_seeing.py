"""Tiny random models that see, as Transformers saves them, and its logits of prompts with images."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from tandem.engine.vision.spans import ImageSpan, PixelSource
from tandem.spec.vision import Processor
from tiny import COMMON, file_tensors, save_tokenizer, settings

IMAGE, VIDEO, START, END = 258, 259, 260, 261
TOWER = settings(
    hidden_size=48, intermediate_size=68, num_heads=4, patch_size=4, spatial_merge_size=2, temporal_patch_size=2,
    num_position_embeddings=36, initializer_range=0.15, out_hidden_size=72,
)  # fmt: skip
PROCESSOR = Processor(patch=4, min_pixels=64, max_pixels=1 << 16)
POSITIONS = settings(
    rope_type="default", rope_theta=5000.0, mrope_section=[4, 4, 4], mrope_interleaved=True
)

# name of the variant: (model_type, keys of its text, keys of its tower)
SEEING: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {
    "qwen3_vl_moe": ("qwen3_vl_moe", settings(
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=24, num_experts=8,
        moe_intermediate_size=28, intermediate_size=52, norm_topk_prob=True, rope_parameters=POSITIONS,
    ), settings(depth=3, deepstack_visual_indexes=[0, 2])),
    "qwen3_vl_moe-shallow": ("qwen3_vl_moe", settings(  # as many levels as layers
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=24, num_experts=6,
        moe_intermediate_size=20, intermediate_size=44, norm_topk_prob=True, decoder_sparse_step=2,
        rope_parameters=POSITIONS | settings(mrope_section=[6, 4, 2]),
    ), settings(depth=4, deepstack_visual_indexes=[1, 3])),
    "qwen3_5_moe": ("qwen3_5_moe", settings(
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=8,
        moe_intermediate_size=28, shared_expert_intermediate_size=36, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=16, linear_value_head_dim=16,
        rope_parameters=POSITIONS | settings(partial_rotary_factor=0.75),
    ), settings(depth=2)),
}  # fmt: skip


FAMILIES = "qwen3_vl_moe", "qwen3_5_moe"


def save_seeing(variant: str, path: Path) -> None:
    """Weights are exact in bf16. Whoever compares with it loads it anew: rounding has changed its buffers, too."""
    model_type, text, tower = SEEING[variant]
    torch.manual_seed(sum(map(ord, variant)))
    config = AutoConfig.for_model(
        model_type, text_config=COMMON | text, vision_config=TOWER | tower, image_token_id=IMAGE,
        video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END,
    )  # fmt: skip
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                tensor.add_(torch.randn_like(tensor) * 0.1)
    model.to(torch.bfloat16).float().save_pretrained(path)
    save_tokenizer(path)
    limits = {"shortest_edge": PROCESSOR.min_pixels, "longest_edge": PROCESSOR.max_pixels}
    written = {
        "patch_size": PROCESSOR.patch, "merge_size": PROCESSOR.merge, "temporal_patch_size": PROCESSOR.temporal,
        "size": limits, "image_mean": list(PROCESSOR.mean), "image_std": list(PROCESSOR.std),
    }  # fmt: skip
    (path / "preprocessor_config.json").write_text(json.dumps(written))


def save_drafted(source: Path, path: Path) -> None:
    """A Qwen3.5 that sees, with a draft layer: a copy of its last layer, joined at random."""
    tensors, last = file_tensors(source), "model.language_model.layers.3."
    torch.manual_seed(6)
    tensors |= {name.replace(last, "mtp.layers.0."): each for name, each in tensors.items() if name.startswith(last)}
    hidden = len(tensors["model.language_model.norm.weight"])
    tensors["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden) * 0.15
    norms = "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"
    tensors |= {f"mtp.{name}.weight": torch.randn(hidden) * 0.1 for name in norms}
    shutil.copytree(source, path, ignore=shutil.ignore_patterns("*.safetensors*"))
    apart = {name: each.contiguous().clone() for name, each in tensors.items()}
    save_file(apart, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (path / "config.json").write_text(json.dumps(config))


OMNI = {
    "model.visual.deepstack_merger_list": "thinker.visual.merger_list", "model.visual.": "thinker.visual.",
    "model.language_model.": "thinker.model.", "lm_head": "thinker.lm_head", "merger.norm": "merger.ln_q",
    "linear_fc1": "mlp.0", "linear_fc2": "mlp.2",
}  # fmt: skip


def save_omni(source: Path, path: Path) -> None:
    """A Qwen3-VL by the names and keys of Qwen3-Omni, which computes the same."""
    tensors = {_omni(name): each.contiguous().clone() for name, each in file_tensors(source).items()}
    shutil.copytree(source, path, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    text = config["text_config"] | {"model_type": "qwen3_omni_moe_text", "norm_topk_prob": True}
    thinker = config | {"model_type": "qwen3_omni_moe_thinker", "text_config": text, "audio_config": {"d_model": 4}}
    whole = {"model_type": "qwen3_omni_moe", "thinker_config": thinker, "talker_config": {"hidden_size": 4}}
    (path / "config.json").write_text(json.dumps(whole))


def _omni(name: str) -> str:
    merges = "merger" in name  # blocks have such names, too
    for theirs, ours in OMNI.items():
        if merges or "linear_fc" not in theirs:
            name = name.replace(theirs, ours)
    return name.replace("merger_list.0.norm", "merger_list.0.ln_q").replace("merger_list.1.norm", "merger_list.1.ln_q")


def image(height: int, width: int, seed: int = 0) -> PixelSource:
    """Image of patches that are all different."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return PixelSource(height=height, width=width, inline=pixels.tobytes())


@dataclass(frozen=True)
class Prompt:
    """Tokens and images in turns."""

    ids: tuple[int, ...]
    images: tuple[ImageSpan, ...]


def prompt(*parts: list[int] | PixelSource) -> Prompt:
    ids, spans = list[int](), list[ImageSpan]()
    for part in parts:
        if isinstance(part, list):
            ids += part
            continue
        grid = PROCESSOR.grid(part.height, part.width)
        rows, key = PROCESSOR.tokens(grid), hashlib.sha256(part.inline or b"").digest()[:16]
        spans.append(ImageSpan(first=len(ids), rows=rows, grid=grid, key=key, pixels=part))
        ids += [IMAGE] * rows
    return Prompt(tuple(ids), tuple(spans))


def text(count: int, seed: int = 1) -> list[int]:
    """Random bytes."""
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@cache
def oracle(path: Path) -> torch.nn.Module:
    plainest = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, **plainest).eval()


def patches(source: PixelSource) -> torch.Tensor:
    """As Transformers' processor lays them out: float32 [patches, 3 * temporal * patch * patch]."""
    p = PROCESSOR
    pixels = np.frombuffer(source.inline or b"", dtype=np.uint8).reshape(source.height, source.width, 3)
    normed = (torch.from_numpy(pixels.copy()).float().permute(2, 0, 1) / 255 - 0.5) / 0.5
    down, across = source.height // p.side, source.width // p.side
    cut = normed.view(3, down, p.merge, p.patch, across, p.merge, p.patch).permute(1, 4, 2, 5, 0, 3, 6)
    twice = cut[..., None, :, :].expand(*cut.shape[:5], p.temporal, p.patch, p.patch)
    return twice.reshape(-1, 3 * p.temporal * p.patch**2)


@cache
def reference(path: Path, asked: Prompt, more: tuple[int, ...] = ()) -> torch.Tensor:
    """Transformers' float32 logits of a prompt and of tokens behind it."""
    model, ids = oracle(path), torch.tensor([[*asked.ids, *more]])
    seen = {}
    if asked.images:
        grids = torch.tensor([image.grid for image in asked.images])
        pixels = torch.cat([patches(image.pixels) for image in asked.images])
        seen = {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": (ids == IMAGE).int()}
    with torch.inference_mode():
        return model(input_ids=ids, **seen).logits[0]

