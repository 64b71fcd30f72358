"""Tensor names of GGUF files → the Hugging Face names that `models/` asks for, by GGUF architecture.

A GGUF name is `blk.{layer}.{stem}.{weight or bias}`; a layer's experts are one 3-D tensor, which stands for one name
per expert here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tandem.architectures import GGUF
from tandem.architectures.family import DerivedTensor
from tandem.checkpoint.gguf_file import GGUFTensor

TABLE = "model.ngram_table"
"""Name of the rows of a table, before `Gguf.parts` gives them to a layer."""
OUTER = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "token_embd_norm": "model.norm",
    "output": "lm_head", "output_hc_norm": "model.norm",
    "output_hc_down": "model.hyper_connection_mixer.input_mix_weight_down",
    "output_hc_up": "model.hyper_connection_mixer.input_mix_weight_up", "per_layer_token_embd": TABLE,
}  # fmt: skip
OUTER_STREAMS = {f"output_hc_{part}": f"model.hc_head.hc_{part}" for part in ("fn", "base", "scale")}
# Ends of Hugging Face names without `.weight` or `.bias`.
PLAIN = (
    ".e_score_correction_bias", ".expert_bias", ".sinks", ".A_log", ".D", ".dt_bias", ".position_bias", ".tid2eid",
    "_hc.fn", "_hc.base", "_hc.scale", "router.scale", ".per_expert_scale", "layer_scalar",
    ".index_kpool_compress_ape",
)  # fmt: skip
LAYER = "model.layers."


GATE_UP = "ffn_gate_up_exps"  # the rows of "ffn_gate_exps", then those of "ffn_up_exps"


class TensorPlace(NamedTuple):
    """Where a Hugging Face tensor is: a tensor of the file, one expert of it, or made of it. half: of an expert's rows,
    where they are of two matrices."""

    tensor: GGUFTensor
    expert: int | None = None
    part: DerivedTensor | None = None
    half: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of an expert's matrix, or vector."""
        rows, *columns = self.tensor.shape[1:]
        return (rows if self.half is None else rows // 2, *columns)


def places(architecture: str, tensor: GGUFTensor) -> Iterator[tuple[str, TensorPlace]]:
    """The Hugging Face names that `tensor` stands for; none for one that no model of ours reads."""
    stem, _, ending = tensor.name.rpartition(".")
    if ending not in ("weight", "bias"):
        stem = tensor.name
    if stem in OUTER_STREAMS:
        yield OUTER_STREAMS[stem], TensorPlace(tensor)
        return
    if stem in OUTER:
        yield f"{OUTER[stem]}.{ending}", TensorPlace(tensor)
        return
    layer, stems, last = layer_of(tensor), GGUF[architecture].stems, stem.split(".", 2)[-1]
    if layer is not None and (last, ending) == (GATE_UP, "weight") and "ffn_gate_exps" in stems:
        yield from _halves(f"{LAYER}{layer}.", stems, tensor)
        return
    name = stems.get(last)
    if layer is None or name is None:
        return
    full = f"{LAYER}{layer}.{name}"
    if name.endswith(PLAIN):
        yield full, TensorPlace(tensor)
    elif "{expert}" in name:
        for expert in range(tensor.shape[0]):
            yield full.format(expert=expert) + f".{ending}", TensorPlace(tensor, expert)
    else:
        yield f"{full}.{ending}", TensorPlace(tensor)


def _halves(layer: str, stems: Mapping[str, str], tensor: GGUFTensor) -> Iterator[tuple[str, TensorPlace]]:
    """Gates and ups in one tensor."""
    for half, stem in enumerate(("ffn_gate_exps", "ffn_up_exps")):
        for expert in range(tensor.shape[0]):
            yield f"{layer}{stems[stem].format(expert=expert)}.weight", TensorPlace(tensor, expert, half=half)


def with_parts(places: dict[str, TensorPlace], parts: Mapping[str, DerivedTensor]) -> dict[str, TensorPlace]:
    """`places` without what is only there to be cut, and with what is made of it."""
    sources = {part.of for part in parts.values()}
    by_name = {name: place for name, place in places.items() if _inner(name) not in sources}
    by_source = {name: place for name, place in places.items() if _inner(name) in sources}
    for name, place in by_source.items():
        front = name.removesuffix(_inner(name))
        same = {front + inner: part for inner, part in parts.items() if part.of == _inner(name)}
        by_name |= {full: place._replace(part=part) for full, part in same.items()}
    return by_name


def _inner(name: str) -> str:
    """Below its layer; the whole name of what belongs to none."""
    return name.removeprefix(LAYER).partition(".")[2] if name.startswith(LAYER) else name


def holds_experts(tensor: GGUFTensor) -> bool:
    """Whether it has a layer's routed experts."""
    return "_exps." in tensor.name


def holds_table(tensor: GGUFTensor) -> bool:
    """Whether it has rows that are read one by one."""
    return tensor.name == "per_layer_token_embd.weight"


def layer_of(tensor: GGUFTensor) -> int | None:
    """The number of its layer; None for what belongs to none."""
    block, _, rest = tensor.name.partition(".")
    number = rest.partition(".")[0]
    return int(number) if block == "blk" and number.isdecimal() else None
