"""How families call the tensors of a layer in a checkpoint, below `model.layers.{L}.`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Modules of routed experts: one per expert and matrix, or all experts in two or three 3-D tensors.

    The fused form, as Transformers 5 holds it: gate_up [E, 2 width, hidden] (gate rows first), down [E, hidden, width].
    stacked: a tensor of all experts for each matrix. interleaved: rows of gate and up take turns. transposed: numbers
    lie as [E, hidden, 2 width] and [E, width, hidden], while codes do not. Biases: the modules' names and `_bias`,
    [E, rows].
    """

    each: str = "mlp.experts.{expert}.{matrix}"
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    gate_up: str = "mlp.experts.gate_up_proj"
    down: str = "mlp.experts.down_proj"
    stacked: str = "mlp.experts.{matrix}"
    interleaved: bool = False
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Names:
    """Modules of a layer; "" where a family has none. layer: what is in front of them. norms, streams, post_norms: of
    its blocks, in order. beside_norms: of the dense feed-forward's result, of what experts take, and of theirs."""

    layer: str = "model.layers.{layer}."
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    streams: tuple[str, ...] = ("attn_hc", "ffn_hc")
    attention: str = "self_attn"
    own_gate: str = "self_attn.g_proj"
    recurrent: str = "linear_attn"
    ngram: str = "ple"
    dense: str = "mlp"
    router: str = "mlp.gate"
    router_bias: str = "mlp.gate.e_score_correction_bias"
    router_table: str = "mlp.gate.tid2eid"
    router_norm: str = "router.scale"
    latent: tuple[str, str] = ("mlp.fc1_latent_proj", "mlp.fc2_latent_proj")  # before and behind all experts
    expert_scale: str = "router.per_expert_scale"
    post_norms: tuple[str, ...] = ("post_attention_layernorm", "post_feedforward_layernorm")
    beside_norms: tuple[str, str, str] = (
        "post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2",
    )  # fmt: skip
    scale: str = "layer_scalar"
    experts: ExpertNames = ExpertNames()
    shared: str = ""
    shared_gate: str = ""

    def at(self, index: int) -> str:
        """Prefix of the modules of layer `index`."""
        return self.layer.format(layer=index)


@dataclass(frozen=True, slots=True)
class Renames:
    """Pieces of names as a family's checkpoints of the hub have them → as its own file has them. Where a name has one
    of `signs`, all names are such; unless one has a piece that only relatives have."""

    pieces: Mapping[str, str]
    signs: tuple[str, ...]
    relatives: tuple[str, ...] = ()

    def fits(self, names: Sequence[str]) -> bool:
        return any(sign in name for name in names for sign in self.signs) and not any(
            other in name for name in names for other in self.relatives
        )


@dataclass(frozen=True, slots=True)
class DraftNames:
    """Modules of a draft layer: its own, and what stands around it. {layer}: the number behind the last layer's.
    projection: of the token and the hidden state together; of the token alone where that has one of its own. streams:
    what is in front of the weights that sum several up."""

    layer: str = "model.layers.{layer}."
    embedding_norm: str = "model.layers.{layer}.enorm"
    hidden_norm: str = "model.layers.{layer}.hnorm"
    projection: str = "model.layers.{layer}.eh_proj"
    norm: str = "model.layers.{layer}.shared_head.norm"
    vocab: str = "model.layers.{layer}.d2t"  # of each token that is drafted: its number less its place, as EAGLE-3 has
    hidden_projection: str = ""
    streams: str = ""

    def behind(self, layers: int) -> DraftNames:
        """As a checkpoint of a model with so many layers has them."""
        return DraftNames(*(part.format(layer=layers) for part in astuple(self)))


PLAIN_DRAFT_NAMES = DraftNames()
"""DeepSeek-V3's."""


@dataclass(frozen=True, slots=True)
class BlockNames:
    """Modules of layers that draft a block of tokens. {number}: a layer's number among them; {last}: the last one's.
    earlier, later: of the two matrices that say which token follows which. confidence: of how likely a draft token
    is."""

    layer: str = "mtp.{number}."
    projection: str = "mtp.0.main_proj"
    projected_norm: str = "mtp.0.main_norm"
    norm: str = "mtp.{last}.norm"
    streams: str = "mtp.{last}.hc_head_"
    earlier: str = "mtp.{last}.markov_head.markov_w1"
    later: str = "mtp.{last}.markov_head.markov_w2"
    confidence: str = "mtp.{last}.confidence_head.proj"

    def at(self, number: int) -> str:
        """Prefix of the modules of layer `number`."""
        return self.layer.format(number=number)

    def of(self, layers: int) -> BlockNames:
        """Names in a block of `layers` layers."""
        others = (part.format(last=layers - 1) for part in astuple(self)[1:])
        return BlockNames(self.layer, *others)


BLOCK_NAMES = BlockNames()
"""DeepSeek-V4's."""

GGUF_DECODER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}
"""Stems that most GGUF architectures share."""
