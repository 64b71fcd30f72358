"""Quilted in plain torch and float64, as its paper would say it; and a tiny random checkpoint of it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, silu

SIZES = {
    "model_type": "quilted", "vocab_size": 263, "hidden_size": 72, "num_hidden_layers": 4, "rms_norm_eps": 1e-6,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 18, "sliding_window": 7, "rope_theta": 5000.0,
    "num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "intermediate_size": 44, "scale": 1.7,
    "max_position_embeddings": 128, "eos_token_id": 257,
}  # fmt: skip
HEADS, KV, DIM, WINDOW, EXPERTS, TOP_K = 6, 2, 18, 7, 9, 3


def shapes() -> dict[str, tuple[int, ...]]:
    """Shapes of every tensor, by its name."""
    hidden, wide, narrow = 72, 44, 20
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (263, hidden), "lm_head.weight": (263, hidden), "model.norm.weight": (hidden,),
    }  # fmt: skip
    for i in range(4):
        at = f"model.layers.{i}."
        rows = {"q": HEADS * DIM, "k": KV * DIM, "v": KV * DIM}
        for each, n in rows.items():
            found |= _biased(f"{at}self_attn.{each}_proj", n, hidden)
        found |= _biased(f"{at}self_attn.o_proj", hidden, HEADS * DIM)
        found |= {f"{at}{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        if i == 0:
            found |= {f"{at}mlp.{m}_proj.weight": (wide, hidden) for m in ("gate", "up")}
            found[f"{at}mlp.down_proj.weight"] = (hidden, wide)
            continue
        found |= _biased(f"{at}mlp.gate", EXPERTS, hidden) | {f"{at}mlp.gate.e_score_correction_bias": (EXPERTS,)}
        for e in range(EXPERTS):
            expert = f"{at}mlp.experts.{e}."
            found |= _biased(f"{expert}gate_proj", narrow, hidden) | _biased(f"{expert}up_proj", narrow, hidden)
            found |= _biased(f"{expert}down_proj", hidden, narrow)
    return found


def _biased(module: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{module}.weight": (rows, columns), f"{module}.bias": (rows,)}


def save(path: Path) -> dict[str, Tensor]:
    """Writes a model directory; its tensors in float64."""
    torch.manual_seed(0)
    made = {name: torch.randn(shape) * (0.15 if len(shape) == 2 else 0.1) for name, shape in shapes().items()}
    tensors = {name: t + 1 if name.endswith("norm.weight") else t for name, t in made.items()}
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(SIZES))
    return {name: t.double() for name, t in tensors.items()}


def logits(w: dict[str, Tensor], ids: list[int]) -> Tensor:
    """[T, vocab] of one prompt."""
    x = w["model.embed_tokens.weight"][ids]
    for i in range(4):
        at = f"model.layers.{i}."
        x = x + _attention(w, f"{at}self_attn.", _norm(x, w[f"{at}input_layernorm.weight"]), WINDOW if i % 2 else 0)
        y = _norm(x, w[f"{at}post_attention_layernorm.weight"])
        x = x + (_experts(w, f"{at}mlp.", y) if i else _gated(w, f"{at}mlp.", y))
    return linear(_norm(x, w["model.norm.weight"]), w["lm_head.weight"])


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def _affine(w: dict[str, Tensor], module: str, x: Tensor) -> Tensor:
    return linear(x, w[f"{module}.weight"], w.get(f"{module}.bias"))


def _gated(w: dict[str, Tensor], at: str, x: Tensor) -> Tensor:
    gate, up = (_affine(w, f"{at}{m}_proj", x) for m in ("gate", "up"))
    return _affine(w, f"{at}down_proj", silu(gate) * up)


def _attention(w: dict[str, Tensor], at: str, x: Tensor, window: int) -> Tensor:
    q, k, v = (_affine(w, f"{at}{m}_proj", x).view(len(x), -1, DIM).transpose(0, 1) for m in "qkv")
    k, v = (each.repeat_interleave(HEADS // KV, 0) for each in (k, v))
    ages = torch.arange(len(x))[:, None] - torch.arange(len(x))
    seen = (ages >= 0) & (ages < (window or len(x)))
    scores = _turned(q) @ _turned(k).transpose(1, 2) / DIM**0.5
    y = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v
    return _affine(w, f"{at}o_proj", y.transpose(0, 1).flatten(1))


def _turned(x: Tensor) -> Tensor:
    speeds = 5000.0 ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    angles = torch.arange(x.shape[1])[:, None] * speeds
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def _experts(w: dict[str, Tensor], at: str, x: Tensor) -> Tensor:
    raw = _affine(w, f"{at}gate", x)
    scores = 0.5 + 0.5 * raw / (1 + raw.abs())
    chosen = (scores + w[f"{at}gate.e_score_correction_bias"]).topk(TOP_K).indices
    weights = scores.gather(1, chosen)
    weights = 1.7 * weights / weights.sum(1, keepdim=True)
    results = torch.stack([_gated(w, f"{at}experts.{e}.", x) for e in range(EXPERTS)], 1)
    return (results.gather(1, chosen[..., None].expand(-1, -1, x.shape[1])) * weights[..., None]).sum(1)
