"""DSpark layers of DeepSeek-V4 with random weights, and a plain reference of them in float64, as DeepSeek describes
them: whole texts, no cache. What the model itself leaves behind its layers is Transformers'."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from drawn_chains import DrawnChains
from tiny import file_tensors

SIZE, STAGES, RANK = 5, 3, 12
FP64 = torch.float64


@dataclass
class BlockDrafted(DrawnChains):
    """As `Drafted`. weights: of the layers, by DeepSeek's names, float64; reads: the model's layers."""

    path: Path
    model: torch.nn.Module
    weights: dict[str, Tensor]
    reads: tuple[int, ...]
    unknown: int

    def logits(self, tokens: list[int], width: int, draft_tokens: Rows[int] = ()) -> list[Tensor]:
        """As `Drafted.logits`."""
        return self.block(tokens, draft_tokens)[0][:width]

    @torch.no_grad()
    def block(self, tokens: list[int], draft_tokens: Rows[int] = ()) -> tuple[list[Tensor], list[float]]:
        """Logits of each draft token behind a text, and how likely it is."""
        x, last = self._layers(tokens), STAGES - 1
        shares = self._made(f"mtp.{last}.hc_head_", x)[0].sigmoid() + self.config.hc_eps
        x = (shares[..., None] * x).sum(1)
        base = self._rms(x, f"mtp.{last}.norm.weight") @ self.model.lm_head.weight.to(FP64).T
        found, sure, before = list[Tensor](), list[float](), tokens[-1]
        w = self.weights
        for i in range(SIZE):
            earlier = w[f"mtp.{last}.markov_head.markov_w1.weight"][before]
            found.append(base[i] + w[f"mtp.{last}.markov_head.markov_w2.weight"] @ earlier)
            both = torch.cat((x[i], earlier))
            sure.append(float(torch.sigmoid(w[f"mtp.{last}.confidence_head.proj.weight"][0] @ both)))
            before = draft_tokens[i] if i < len(draft_tokens) else int(found[-1].argmax())
        return found, sure

    @property
    def config(self):
        return self.model.config

    def _layers(self, tokens: list[int]) -> Tensor:
        """The block's rows behind all layers, [SIZE, n, hidden]."""
        seen = self._seen(tokens[:-1])
        ids = [tokens[-1], *[self.unknown] * (SIZE - 1)]
        x = self.model.model.embed_tokens.weight[ids].to(FP64)[:, None].expand(-1, self.config.hc_mult, -1)
        for stage in range(STAGES):
            at = f"mtp.{stage}."
            y, back = self._enter(at + "hc_attn_", x)
            x = self._leave(x, self._attend(at, self._rms(y, at + "attn_norm.weight"), seen), *back)
            y, back = self._enter(at + "hc_ffn_", x)
            x = self._leave(x, self._experts(at + "ffn.", self._rms(y, at + "ffn_norm.weight")), *back)
        return x

    def _seen(self, tokens: list[int]) -> Tensor:
        """Rows that a text's keys are made of, [T, hidden]."""
        streams: dict[int, Tensor] = {}
        hooks = [self.model.model.layers[i].register_forward_hook(
                     lambda _, __, out, i=i: streams.update({i: out[0] if isinstance(out, tuple) else out}))
                 for i in self.reads]  # fmt: skip
        self.model(torch.tensor([tokens]))
        for hook in hooks:
            hook.remove()
        read = torch.cat([streams[i][0].to(FP64).mean(1) for i in self.reads], -1)
        return self._rms(read @ self.weights["mtp.0.main_proj.weight"].T, "mtp.0.main_norm.weight")

    def _attend(self, at: str, x: Tensor, seen: Tensor) -> Tensor:
        c, w, past = self.config, self.weights, len(seen)
        at += "attn."
        heads, dim = c.num_attention_heads, c.head_dim
        latent = self._rms(x @ w[at + "wq_a.weight"].T, at + "q_norm.weight")
        q = self._unit((latent @ w[at + "wq_b.weight"].T).view(len(x), heads, dim))
        keys = self._rms(torch.cat((seen, x)) @ w[at + "wkv.weight"].T, at + "kv_norm.weight")
        keys = self._turned(keys, torch.arange(len(keys)))[max(0, past - c.sliding_window) :]
        places = past + torch.arange(len(x))
        scores = torch.einsum("thd,kd->thk", self._turned(q, places), keys) * dim**-0.5
        sinks = w[at + "attn_sink"][None, :, None].expand(len(x), -1, 1)
        out = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1] @ keys
        out = self._turned(out, places, -1).reshape(len(x), c.o_groups, -1)
        parts = w[at + "wo_a.weight"].view(c.o_groups, c.o_lora_rank, -1)
        return torch.einsum("tgd,grd->tgr", out, parts).flatten(1) @ w[at + "wo_b.weight"].T

    def _turned(self, x: Tensor, places: Tensor, sign: int = 1) -> Tensor:
        """Neighbours among the last channels."""
        dims = int(self.config.head_dim * self.config.partial_rotary_factor)
        angles = places[:, None].to(FP64) * 10000.0 ** (-torch.arange(0, dims, 2, dtype=FP64) / dims)
        angles = (sign * angles).view(len(places), *[1] * (x.dim() - 2), -1)
        a, b = x[..., -dims::2], x[..., -dims + 1 :: 2]
        pairs = torch.stack((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)
        return torch.cat((x[..., :-dims], pairs.flatten(-2)), -1)

    def _experts(self, at: str, x: Tensor) -> Tensor:
        c, w = self.config, self.weights
        scores = F.softplus(x @ w[at + "gate.weight"].T).sqrt()
        chosen = (scores + w[at + "gate.bias"]).topk(c.num_experts_per_tok, -1).indices
        shares = scores.gather(1, chosen)
        shares = shares / shares.sum(-1, keepdim=True) * c.routed_scaling_factor
        rows = [sum(share * self._expert(f"{at}experts.{e}.", row) for share, e in zip(s, ids.tolist(), strict=True))
                for row, s, ids in zip(x, shares, chosen, strict=True)]  # fmt: skip
        return torch.stack(rows) + self._expert(at + "shared_experts.", x)

    def _expert(self, at: str, x: Tensor) -> Tensor:
        limit, w = self.config.swiglu_limit, self.weights
        gate, up = x @ w[at + "w1.weight"].T, x @ w[at + "w3.weight"].T
        return (F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)) @ w[at + "w2.weight"].T

    def _made(self, at: str, x: Tensor) -> list[Tensor]:
        """Projections of streams, in parts of one scale each."""
        n, flat = x.shape[1], self._unit(x.flatten(1))
        made, scale, base = flat @ self.weights[at + "fn"].T, self.weights[at + "scale"], self.weights[at + "base"]
        sizes = [n] if len(scale) == 1 else [n, n, n * n]
        parts = zip(made.split(sizes, 1), scale, base.split(sizes), strict=True)
        return [part * by + plus for part, by, plus in parts]

    def _enter(self, at: str, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        n, eps = x.shape[1], self.config.hc_eps
        into, out, mixing = self._made(at, x)
        grid = mixing.view(-1, n, n).softmax(-1) + eps
        grid = grid / (grid.sum(-2, keepdim=True) + eps)
        for _ in range(self.config.hc_sinkhorn_iters - 1):
            grid = grid / (grid.sum(-1, keepdim=True) + eps)
            grid = grid / (grid.sum(-2, keepdim=True) + eps)
        return ((into.sigmoid() + eps)[..., None] * x).sum(1), (2 * out.sigmoid(), grid)

    def _leave(self, x: Tensor, y: Tensor, share: Tensor, grid: Tensor) -> Tensor:
        return share[..., None] * y[:, None] + torch.einsum("tij,tid->tjd", grid, x)

    def _unit(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps)

    def _rms(self, x: Tensor, name: str) -> Tensor:
        return self._unit(x) * self.weights[name]


def block_drafted(source: Path, path: Path, seed: int = 5, sure: bool = True) -> BlockDrafted:
    """`source` with DSpark layers, as `path`. sure: they say how likely draft tokens are."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
    torch.manual_seed(seed)
    reads, unknown = tuple(range(model.config.num_hidden_layers))[-3:], 9
    weights = {name: _made(name, shape) for name, shape in _shapes(model.config, len(reads)).items()}
    if not path.exists():
        shutil.copytree(source, path)
        kept = {name: w.float() for name, w in weights.items() if sure or "confidence" not in name}
        tensors = file_tensors(source) | kept
        for file in path.glob("*.safetensors*"):
            file.unlink()
        save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors", {"format": "pt"})
        said = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(said | _keys(reads, unknown)))
    return BlockDrafted(path, model, weights, reads, unknown)


def _keys(reads: tuple[int, ...], unknown: int) -> dict[str, object]:
    return {"num_nextn_predict_layers": 1, "dspark_block_size": SIZE, "dspark_noise_token_id": unknown,
            "dspark_target_layer_ids": list(reads), "dspark_markov_rank": RANK}  # fmt: skip


def _shapes(c, reads: int) -> dict[str, tuple[int, ...]]:
    hidden, last = c.hidden_size, STAGES - 1
    found = {f"mtp.{stage}.{name}": shape for stage in range(STAGES) for name, shape in _layer_shapes(c).items()}
    found |= {"mtp.0.main_proj.weight": (hidden, reads * hidden), "mtp.0.main_norm.weight": (hidden,)}
    ending = {"norm.weight": (hidden,), "hc_head_fn": (c.hc_mult, c.hc_mult * hidden), "hc_head_base": (c.hc_mult,),
              "hc_head_scale": (1,), "markov_head.markov_w1.weight": (c.vocab_size, RANK),
              "markov_head.markov_w2.weight": (c.vocab_size, RANK), "confidence_head.proj.weight": (1, hidden + RANK)}
    return found | {f"mtp.{last}.{name}": shape for name, shape in ending.items()}


def _layer_shapes(c) -> dict[str, tuple[int, ...]]:
    hidden, width, n = c.hidden_size, c.num_attention_heads * c.head_dim, c.hc_mult
    heads, rank = c.num_attention_heads, c.q_lora_rank
    attention = {
        "attn_sink": (heads,), "wq_a.weight": (rank, hidden), "q_norm.weight": (rank,), "wq_b.weight": (width, rank),
        "wkv.weight": (c.head_dim, hidden), "kv_norm.weight": (c.head_dim,),
        "wo_a.weight": (c.o_groups * c.o_lora_rank, width // c.o_groups),
        "wo_b.weight": (hidden, c.o_groups * c.o_lora_rank),
    }  # fmt: skip
    streams = {"fn": ((2 + n) * n, n * hidden), "base": ((2 + n) * n,), "scale": (3,)}
    wide, high = (c.moe_intermediate_size, hidden), (hidden, c.moe_intermediate_size)
    each = [*(f"experts.{e}" for e in range(c.n_routed_experts)), "shared_experts"]
    matrices = {"w1": wide, "w2": high, "w3": wide}
    experts = {f"{where}.{name}.weight": shape for where in each for name, shape in matrices.items()}
    return {
        **{f"attn.{name}": shape for name, shape in attention.items()},
        **{f"hc_{block}_{name}": shape for block in ("attn", "ffn") for name, shape in streams.items()},
        **{f"ffn.{name}": shape for name, shape in experts.items()},
        "ffn.gate.weight": (c.n_routed_experts, hidden), "ffn.gate.bias": (c.n_routed_experts,),
        "attn_norm.weight": (hidden,), "ffn_norm.weight": (hidden,),
    }  # fmt: skip


def _made(name: str, shape: tuple[int, ...]) -> Tensor:
    drawn = torch.randn(shape)
    around_one = "norm" in name or name.endswith("scale")
    return (1.0 + 0.1 * drawn if around_one else 0.15 * drawn).bfloat16().to(FP64)
