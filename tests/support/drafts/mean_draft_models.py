"""A draft layer of GLM-5.3-Flash with random weights, and a plain reference of whole texts: its attention and experts
as Transformers has them; what is around them, which Transformers leaves out, is written here."""

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

AROUND = ("enorm", "hnorm", "eh_proj", "shared_head.norm")


@dataclass
class MeanDrafted(DrawnChains):
    """As `Drafted`. block: a model of one layer, which is the draft's; around: what is before and behind it."""

    path: Path
    model: torch.nn.Module
    block: torch.nn.Module
    around: dict[str, Tensor]

    @torch.no_grad()
    def logits(self, tokens: list[int], width: int, draft_tokens: Rows[int] = ()) -> list[Tensor]:
        """Logits of each draft token of a chain, [vocab]. draft_tokens: taken as accepted; else the likeliest are."""
        hidden, ids, found = self._means(tokens[:-1]), list(tokens[1:]), list[Tensor]()
        while True:
            after = self._layer(hidden, ids)[:, -1:]
            found.append(self.model.lm_head(self._normed(after, "shared_head.norm"))[0, -1])
            if len(found) == width:
                return found
            ids.append(draft_tokens[len(found) - 1] if draft_tokens else int(found[-1].argmax()))
            hidden = torch.cat((hidden, after), 1)

    def _means(self, tokens: list[int]) -> Tensor:
        """Means of the streams that the model's last layer leaves, [1, T, hidden]."""
        seen: list[Tensor] = []
        hook = self.model.model.norm.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        self.model(torch.tensor([tokens]))
        hook.remove()
        return seen[0]

    def _layer(self, hidden: Tensor, ids: list[int]) -> Tensor:
        embedded = self.model.model.embed_tokens(torch.tensor([ids]))
        both = torch.cat((self._normed(embedded, "enorm"), self._normed(hidden, "hnorm")), -1)
        x, layer = F.linear(both, self.around["eh_proj"]), self.block.model.layers[0]
        mask = torch.ones(1, len(ids), dtype=torch.bool)
        attended = layer.self_attn(
            hidden_states=layer.input_layernorm(x), attention_mask=mask, position_ids=torch.arange(len(ids))[None],
            cache=None, use_cache=False, position_embeddings=None, prev_topk_indices=None,
        )  # fmt: skip
        x = x + attended[0]
        made: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
        return made

    def _normed(self, x: Tensor, name: str) -> Tensor:
        eps = self.model.config.rms_norm_eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self.around[name]


def mean_drafted(source: Path, path: Path, seed: int) -> MeanDrafted:
    """`source` with a draft layer, as `path`."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
    torch.manual_seed(seed)
    block, around = _block(model.config), _around(model.config.hidden_size)
    if not path.exists():
        shutil.copytree(source, path)
        tensors = file_tensors(source) | dict(_stored(block, around, model.config.num_hidden_layers))
        for file in path.glob("*.safetensors*"):
            file.unlink()
        save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors", {"format": "pt"})
        said = json.loads((path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
        (path / "config.json").write_text(json.dumps(said))
    return MeanDrafted(path, model, block, around)


def _block(config) -> torch.nn.Module:
    """A model of one layer that chooses among pools."""
    alone = copy.deepcopy(config)
    alone.num_hidden_layers, alone.layer_types, alone.mlp_layer_types = 1, ["indexed_attention"], ["sparse"]
    alone.indexer_types = ["full"]
    block = AutoModelForCausalLM.from_config(alone, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
            tensor.copy_(_made(name, tensor.shape))
    return block


def _around(hidden: int) -> dict[str, Tensor]:
    return {name: _made(name, (hidden, 2 * hidden) if name == "eh_proj" else (hidden,)) for name in AROUND}


def _made(name: str, shape) -> Tensor:
    norm = "norm" in name and not name.endswith("bias")
    return ((1.0 if norm else 0.0) + (0.1 if norm else 0.15) * torch.randn(shape)).bfloat16().float()


def _stored(block: torch.nn.Module, around: dict[str, Tensor], number: int) -> Iterator[tuple[str, Tensor]]:
    """By the names of published checkpoints."""
    with TemporaryDirectory() as folder:
        block.save_pretrained(folder)
        saved = file_tensors(Path(folder))
    for name, tensor in saved.items():
        if name.startswith("model.layers.0.") and "_hc." not in name and ".hc_" not in name:
            yield name.replace(".0.", f".{number}.", 1), tensor
    for name, tensor in around.items():
        yield f"model.layers.{number}.{name}.weight", tensor
