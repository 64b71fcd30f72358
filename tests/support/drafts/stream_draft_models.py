"""A draft layer of DeepSeek-V4 with random weights, and a plain reference: blocks as Transformers has them, of whole
texts without any cache; what is around them is written here as DeepSeek describes it."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from drawn_chains import DrawnChains
from tiny import file_tensors

TURNS = ("main", "compress")
BETWEEN = ("e_proj", "h_proj", "enorm", "hnorm")


@dataclass
class StreamDrafted(DrawnChains):
    """As `Drafted`. block: a model of one layer, which is the draft's; between: what joins token and streams."""

    path: Path
    model: torch.nn.Module
    block: torch.nn.Module
    between: dict[str, Tensor]

    @torch.no_grad()
    def logits(self, tokens: list[int], width: int, draft_tokens: Rows[int] = ()) -> list[Tensor]:
        """Logits of each draft token of a chain, [vocab]. draft_tokens: taken as accepted; else the likeliest are."""
        streams, ids, found = self._streams(tokens[:-1]), list(tokens[1:]), list[Tensor]()
        while True:
            after = self._layer(streams, ids)
            found.append(self._scores(after[:, -1:]))
            if len(found) == width:
                return found
            ids.append(draft_tokens[len(found) - 1] if draft_tokens else int(found[-1].argmax()))
            streams = torch.cat((streams, after[:, -1:]), 1)

    def _streams(self, tokens: list[int]) -> Tensor:
        """Streams that the model's last layer leaves, [1, T, n, hidden]."""
        seen: list[Tensor] = []
        hook = self.model.model.hc_head.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        self.model(torch.tensor([tokens]))
        hook.remove()
        return seen[0]

    def _layer(self, streams: Tensor, ids: list[int]) -> Tensor:
        embedded = self.model.model.embed_tokens(torch.tensor([ids]))
        token = F.linear(self._normed(embedded, "enorm"), self.between["e_proj"])
        x = token[:, :, None] + F.linear(self._normed(streams, "hnorm"), self.between["h_proj"])
        inner, places = self.block.model, torch.arange(len(ids))
        turned = {kind: inner.rotary_emb(token, position_ids=places[None], layer_type=kind) for kind in TURNS}
        back = places[:, None] - places
        mask = torch.zeros(back.shape).masked_fill(
            (back < 0) | (back >= self.model.config.sliding_window), -torch.inf
        )
        return inner.layers[0](
            x, position_embeddings=turned, position_ids=places[None], attention_mask=mask[None, None],
            input_ids=torch.tensor([ids]),
        )  # fmt: skip

    def _normed(self, x: Tensor, name: str) -> Tensor:
        eps = self.model.config.rms_norm_eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self.between[name]

    def _scores(self, streams: Tensor) -> Tensor:
        inner = self.block.model
        return self.model.lm_head(inner.norm(inner.hc_head(streams)))[0, -1]


def stream_drafted(source: Path, path: Path, seed: int) -> StreamDrafted:
    """`source` with a draft layer, as `path`."""
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    torch.manual_seed(seed)
    block, between = _block(model.config), _between(model.config.hidden_size)
    if not path.exists():
        shutil.copytree(source, path)
        tensors = file_tensors(source) | dict(_stored(block, between))
        for file in path.glob("*.safetensors*"):
            file.unlink()
        save_file(
            {k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors", {"format": "pt"}
        )
        said = json.loads((path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
        (path / "config.json").write_text(json.dumps(said))
    return StreamDrafted(path, model, block, between)


def _block(config) -> torch.nn.Module:
    """A model of one layer that sees a window, and whose router scores."""
    alone = copy.deepcopy(config)
    alone.num_hidden_layers, alone.layer_types, alone.mlp_layer_types = 1, ["sliding_attention"], ["moe"]
    block = AutoModelForCausalLM.from_config(alone, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
            if "inv_freq" not in name:
                tensor.copy_(_made(tensor.shape, "norm" in name or name.endswith("scale")))
    return block


def _between(hidden: int) -> dict[str, Tensor]:
    shapes = {name: (hidden,) if "norm" in name else (hidden, hidden) for name in BETWEEN}
    return {name: _made(shape, "norm" in name) for name, shape in shapes.items()}


def _made(shape, around_one: bool) -> Tensor:
    drawn = torch.randn(shape)
    return (1.0 + 0.1 * drawn if around_one else 0.15 * drawn).bfloat16().float()


def _stored(block: torch.nn.Module, between: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """By DeepSeek's names, with which Transformers saves layers."""
    with TemporaryDirectory() as folder:
        block.save_pretrained(folder)
        saved = {name.removeprefix("model."): tensor for name, tensor in file_tensors(Path(folder)).items()}
    for name, tensor in saved.items():
        if name.startswith("layers.0."):
            yield f"mtp.0.{name.removeprefix('layers.0.')}", tensor
        elif name.startswith(("norm.", "hc_head")):
            yield f"mtp.0.{name.replace('hc_head.hc_', 'hc_head_')}", tensor
    for name, tensor in between.items():
        yield f"mtp.0.{name}.weight", tensor
