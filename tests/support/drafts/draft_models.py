"""Tiny models with a draft layer of random weights, their engines, and Transformers' own `MtpModel` beside them."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from drawn_chains import DrawnChains
from gated_draft_models import GatedDrafted, gated_drafted
from kernel_cases import INVARIANT_TIER
from mean_draft_models import MeanDrafted, mean_drafted
from recorded_steps import tiny_engine
from stream_draft_models import StreamDrafted, stream_drafted
from tandem.engine.engine import Engine
from tiny import file_tensors

FAMILIES = (
    "glm4_moe", "glm4_moe-plain", "deepseek_v3", "deepseek_v3-plain", "glm4_moe_lite", "deepseek_v32", "qwen3_next",
    "qwen3_5_moe_text", "deepseek_v4", "deepseek_v4-every", "qwen4_exp", "glm5_next", "glm5_next-pools",
    "bailing_hybrid",
)  # fmt: skip
PROMPTS = {"a": [7, 8, 9, 7, 8], "b": [40] * 20, "c": list(range(60, 99))}
LING = {"self_attn.o_proj": "attention.dense", "self_attn": "attention", "e_score_correction_bias": "expert_bias"}
QWEN = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}


@dataclass
class Drafted(DrawnChains):
    """A model directory with a draft layer, and the reference."""

    path: Path
    model: torch.nn.Module
    layer: MtpModel

    @torch.no_grad()
    def logits(self, tokens: list[int], width: int, draft_tokens: Rows[int] = ()) -> list[Tensor]:
        """Logits of each draft token of a chain, [vocab]. draft_tokens: taken as accepted; else the likeliest are."""
        ids = torch.tensor([tokens])
        hidden = self.model(ids[:, :-1], output_hidden_states=True).hidden_states[-1]
        kept = copy.deepcopy(self.layer.config)
        if (kinds := getattr(self.model.config, "layer_types", None)) is not None:
            attentions = [kind for kind in kinds if kind != "linear_attention"]
            kept.layer_types = attentions[-1:]  # MtpModel masks an indexed layer only if it is called a full one
        cache, inputs = MtpCache(config=kept), ids[:, 1:]
        positions = torch.arange(1, len(tokens))[None]
        found: list[Tensor] = []
        while True:
            hidden = _run(self.layer, hidden, positions, cache, inputs)[:, -1:]
            found.append(self.model.lm_head(hidden)[0, -1])
            if len(found) == width:
                return found
            came = draft_tokens[len(found) - 1] if draft_tokens else int(found[-1].argmax())
            inputs, positions = torch.tensor([[came]]), positions[:, -1:] + 1


def _run(layer: MtpModel, hidden: Tensor, positions: Tensor, cache: MtpCache, ids: Tensor) -> Tensor:
    """Output of its one layer for rows. Before 5.18 Transformers runs it only inside a loop of its own."""
    if hasattr(layer, "forward_layer"):
        return layer.forward_layer(0, hidden, positions, cache, input_ids=ids)
    embedded = layer.embed_tokens(ids)
    turner = layer.rotary_emb
    places = positions[None].expand(3, -1, -1) if hasattr(turner, "mrope_section") else positions  # of text: all alike
    turned = None if turner is None else turner(embedded, position_ids=places)
    masks = layer.create_masks_for_mtp_layer(0, embedded, cache, positions)
    return layer.layers[0](
        embedded, hidden, position_embeddings=turned, position_ids=positions, past_key_values=cache, **masks
    )  # fmt: skip


def drafted(
    source: Path, path: Path, *, seed: int = 5, taught: Rows[list[int]] = ()
) -> Drafted | StreamDrafted | GatedDrafted | MeanDrafted:
    """`source` with a draft layer, as `path`. taught: texts that it has learnt, so that it drafts them as they are."""
    own = {"deepseek_v4": stream_drafted, "qwen4_exp_text": gated_drafted, "glm5_next_text": mean_drafted}
    if (make := own.get(json.loads((source / "config.json").read_text())["model_type"])) is not None:
        return make(source, path, seed)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
    config = model.config
    config.num_mtp_layers, config.mtp_layer_types, config.mtp_mlp_layer_types = 1, ["full_attention"], ["sparse"]
    torch.manual_seed(seed)
    layer = MtpModel(model, 1).eval()
    with torch.no_grad():
        for name, tensor in [*layer.layers.named_parameters(), *layer.layers.named_buffers()]:
            centre = 1.0 if "norm" in name and "qwen" not in config.model_type else 0.0
            tensor.copy_((centre + torch.randn_like(tensor) * (0.1 if "norm" in name else 0.15)).bfloat16())
    if taught:
        _teach(model, layer, taught)
    if not path.exists():
        shutil.copytree(source, path)
        tensors = file_tensors(source) | _stored(layer, config)
        for file in path.glob("*.safetensors*"):
            file.unlink()
        save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors", {"format": "pt"})
        said = json.loads((path / "config.json").read_text())
        said["num_nextn_predict_layers"] = 1
        said.pop("num_mtp_layers", None)
        (path / "config.json").write_text(json.dumps(said))
    return Drafted(path, model, layer)


def _teach(model: torch.nn.Module, layer: MtpModel, texts: Rows[list[int]], rounds: int = 60) -> None:
    parameters = [p.requires_grad_() for p in layer.layers.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=4e-3)
    for text in list(texts) * rounds:
        ids = torch.tensor([text])
        with torch.no_grad():
            hidden = model(ids[:, :-1], output_hidden_states=True).hidden_states[-1]
        positions, inputs = torch.arange(1, len(text))[None], ids[:, 1:]
        out = _run(layer, hidden, positions, MtpCache(config=layer.config), inputs)
        loss = torch.nn.functional.cross_entropy(model.lm_head(out[0, :-1]), ids[0, 2:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _stored(layer: MtpModel, config) -> dict[str, Tensor]:
    """By the names of published checkpoints."""
    qwen = "qwen" in config.model_type
    number = json.loads(json.dumps(config.to_dict()["num_hidden_layers"]))
    before = "mtp.layers.0." if qwen else f"model.layers.{number}."
    found: dict[str, Tensor] = {}
    for name, tensor in layer.layers[0].state_dict().items():
        module, _, rest = name.partition(".")
        if module == "mtp_block":
            found |= _split(before + rest, tensor)
        elif qwen:
            found[f"mtp.{QWEN[module]}.{rest}"] = tensor
        else:
            last = "final_layernorm" if config.model_type == "bailing_hybrid" else "shared_head.norm"
            found[f"{before}{last if module == 'post_norm' else module}.{rest}"] = tensor
    return {_of_ling(name): tensor for name, tensor in found.items()} if "bailing" in config.model_type else found


def _of_ling(name: str) -> str:
    for ours, theirs in LING.items():
        name = name.replace(ours, theirs)
    return name


def _split(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Experts one by one."""
    head, _, last = name.rpartition(".")
    if last == "gate_up_proj":
        halves = (each.chunk(2) for each in tensor)
        pairs = [(f"{head}.{e}.{m}_proj.weight", w) for e, both in enumerate(halves)
                 for m, w in zip(("gate", "up"), both, strict=True)]  # fmt: skip
        return dict(pairs)
    if last == "down_proj" and tensor.dim() == 3:
        return {f"{head}.{e}.down_proj.weight": each for e, each in enumerate(tensor)}
    return {name: tensor}


def engine_of(path: Path, tmp_path: Path, **flags) -> Engine:
    return tiny_engine(path, tmp_path, **draft_flags(**flags))


def draft_flags(**flags) -> dict[str, object]:
    """Three draft tokens in every step, on a tier whose bits do not depend on the batch."""
    return {"speculative_algorithm": "NEXTN", "kernel_tier": INVARIANT_TIER, "disable_speculative_governor": True,
            "page_size": 4} | flags  # fmt: skip


def chunks_of(engine: Engine, *asks) -> Iterator[tuple[list[int], tuple[int, ...]]]:
    """Chunks of every step: what a sequence had, and what was drafted behind it. Runs the engine."""
    for ask in asks:
        engine.add(ask)
    told, run_model = [], engine._runner.start

    def noted(step, *others):
        told.extend((list(c.sequence.tokens), c.draft_tokens) for c in step.chunks if c.draft_tokens)
        return run_model(step, *others)

    engine._runner.start = noted
    while engine.has_work():
        engine.step()
        yield from told
        told.clear()
