"""A draft layer of Qwen3.8-Flash-Next with random weights, and a plain reference: the layer as Transformers has it, of
whole texts without any cache; what is around it, which Transformers leaves out, is written here."""

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


@dataclass
class GatedDrafted(DrawnChains):
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
            found.append(self.model.lm_head(self.block.model.hyper_connection_mixer(after[:, -1:]))[0, -1])
            if len(found) == width:
                return found
            ids.append(draft_tokens[len(found) - 1] if draft_tokens else int(found[-1].argmax()))
            streams = torch.cat((streams, after[:, -1:]), 1)

    def _streams(self, tokens: list[int]) -> Tensor:
        """Streams that the model's last layer leaves, [1, T, n * hidden]."""
        seen: list[Tensor] = []
        mixer = self.model.model.hyper_connection_mixer
        hook = mixer.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        self.model(torch.tensor([tokens]))
        hook.remove()
        return seen[0]

    def _layer(self, streams: Tensor, ids: list[int]) -> Tensor:
        count, hidden = self.model.config.hc_count, self.model.config.hidden_size
        embedded = self.model.model.embed_tokens(torch.tensor([ids]))
        token = F.linear(self._normed(embedded, "pre_fc_norm_embedding"), self.between["fc_embedding"])
        wide = self._normed(streams, "pre_fc_norm_hidden").unflatten(-1, (count, hidden))
        x = (token[:, :, None] + F.linear(wide, self.between["fc_hidden"])).flatten(-2)
        places = torch.arange(len(ids))
        turned = self.block.model.rotary_emb(x, places.view(1, 1, -1).expand(3, 1, -1))
        mask = torch.zeros(len(ids), len(ids)).masked_fill(places[:, None] < places, -torch.inf)
        made: Tensor = self.block.model.layers[0](
            x, position_embeddings=turned, attention_mask=mask[None, None], conv_mask=None, cache=None,
            ple_input_ids=None,
        )  # fmt: skip
        return made

    def _normed(self, x: Tensor, name: str) -> Tensor:
        eps = self.model.config.rms_norm_eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1 + self.between[name])


def gated_drafted(source: Path, path: Path, seed: int) -> GatedDrafted:
    """`source` with a draft layer, as `path`."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
    torch.manual_seed(seed)
    block, between = _block(model.config), _between(model.config)
    if not path.exists():
        shutil.copytree(source, path)
        tensors = file_tensors(source) | dict(_stored(block, between))
        for file in path.glob("*.safetensors*"):
            file.unlink()
        save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors", {"format": "pt"})
        said = json.loads((path / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
        (path / "config.json").write_text(json.dumps(said))
    return GatedDrafted(path, model, block, between)


def _block(config) -> torch.nn.Module:
    """A model of one layer that chooses, without n-grams."""
    alone = copy.deepcopy(config)
    alone.num_hidden_layers, alone.layer_types, alone.ple_layer_ids = 1, ["indexed_attention"], []
    block = AutoModelForCausalLM.from_config(alone, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, tensor in block.named_parameters():
            tensor.copy_(_made(tensor.shape, 0.1 if "norm" in name else 0.15))
    return block


def _between(config) -> dict[str, Tensor]:
    hidden = config.hidden_size
    shapes = {
        "fc_embedding": (hidden, hidden), "fc_hidden": (hidden, hidden), "pre_fc_norm_embedding": (hidden,),
        "pre_fc_norm_hidden": (config.hc_count * hidden,),
    }  # fmt: skip
    return {name: _made(shape, 0.1 if "norm" in name else 0.15) for name, shape in shapes.items()}


def _made(shape, spread: float) -> Tensor:
    return (spread * torch.randn(shape)).bfloat16().float()


def _stored(block: torch.nn.Module, between: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """By the names of published checkpoints."""
    with TemporaryDirectory() as folder:
        block.save_pretrained(folder)
        saved = {name.removeprefix("model."): tensor for name, tensor in file_tensors(Path(folder)).items()}
    for name, tensor in saved.items():
        if name.startswith(("layers.0.", "hyper_connection_mixer.")):
            yield f"mtp.{name}", tensor
    for name, tensor in between.items():
        yield f"mtp.{name}.weight", tensor
