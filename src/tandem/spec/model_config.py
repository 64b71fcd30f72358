"""`ModelConfig`: the checkpoint's architecture in our words, normalised once from its `config.json`.

Nothing below `models/` sees a Hugging Face key: a key is read in `architectures/`, or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from tandem.errors import ConfigError
from tandem.mechanisms.cost import cost_of
from tandem.mechanisms.experts.shape import NO_EXPERTS, Moe
from tandem.spec.activation import SILU
from tandem.spec.drafts import Drafts
from tandem.spec.layers import Attention, Body, Layer, Mixer, ResidualStreams
from tandem.spec.norm import Norm
from tandem.spec.shard import ALONE, RankShard, Share
from tandem.spec.state import DTYPE_BYTES, State, StateLayout, state_layout
from tandem.spec.stored import UNQUANTISED, RowTable, StoredFormat, StoredFormats
from tandem.spec.vision import Tower

FORMAT_BYTES = {"f32": 4.0, "bf16": 2.0, "int8": 1.0625, "int4": 0.5625}
"""Bytes per weight as packed; int8 and int4 carry one bf16 scale per group of 32 weights."""

STORED = "stored"  # the format that means: as the checkpoint has it


@dataclass(frozen=True, slots=True)
class ForeignCode:
    """A model that runs through another library's modules. config_json: what its config.json says. why_single: why its
    sequences run one at a time; "": they are packed."""

    config_json: str
    why_single: str = ""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: an embedding, layers, a last norm, a head. Built by `load_config`."""

    model_type: str
    hidden: int
    vocab: int
    layers: tuple[Layer, ...]
    norm: Norm  # the last one
    tied_embeddings: bool
    max_positions: int
    eos_ids: tuple[int, ...] = ()
    unread_keys: tuple[str, ...] = ()  # keys of config.json that may matter and were not understood
    draft: str = ""  # what of the checkpoint would draft tokens, and is not run
    drafts: Drafts | None = None  # what drafts tokens, if the checkpoint has it ...
    drafter: Drafts | None = None  # ... and the same, if it is loaded
    tower: Tower | None = None  # what reads images, if the checkpoint has it ...
    vision: Tower | None = None  # ... and the same, if it is loaded
    blind: str = ""  # why a tower that config.json names is none
    foreign: ForeignCode | None = None  # None: Tandem's own code runs it
    embedding_scale: float = 1.0  # embedded tokens are multiplied with it
    embedding_scale_rounded: bool = False  # it is of the activations' type
    logit_scale: float = 1.0  # logits are multiplied with it
    unit_head: bool = False  # the head's columns are divided by their length
    logit_cap: float = 0.0  # logits are cap * tanh(logits / cap); 0: as they are
    shard: RankShard = ALONE  # whose part of the model this is: `ranks.cut`
    # Sums and layouts by what was asked: a planner asks for the same ones many times.
    _sums: dict[Any, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    _layouts: dict[tuple[str, int, int], StateLayout] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        layers = self.layers if self.drafts is None else (*self.layers, *self.drafts.layers)
        if len({_experts_of(layer.moe) for layer in layers} - {None}) > 1:
            raise ConfigError("config.json: experts that differ between layers are not supported")

    @cached_property
    def moe_layers(self) -> tuple[int, ...]:
        """Which layers have routed experts."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.moe is not None)

    @cached_property
    def moe(self) -> Moe:
        """Routed experts, the same in every layer that has any; NO_EXPERTS where none has."""
        return NO_EXPERTS if not self.moe_layers else self.layers[self.moe_layers[0]].moe or NO_EXPERTS

    @cached_property
    def mixers(self) -> tuple[Mixer, ...]:
        """Token mixers, one of each layer that has one."""
        return tuple(layer.mixer for layer in self.layers if layer.mixer is not None)

    @cached_property
    def attentions(self) -> tuple[Attention, ...]:
        """The mixers that look back at tokens."""
        return tuple(mixer for mixer in self.mixers if isinstance(mixer, Attention))

    @cached_property
    def bodies(self) -> tuple[Body, ...]:
        """Bodies of all blocks, in the order in which they run."""
        return tuple(block.body for layer in self.layers for block in layer.blocks)

    @property
    def tables(self) -> tuple[RowTable, ...]:
        """That are read by row."""
        return tuple(table for body in self.bodies for table in cost_of(body).tables)

    @cached_property
    def states(self) -> tuple[State, ...]:
        """States that all blocks keep of a sequence; behind them, a draft layer's."""
        own = tuple(state for body in self.bodies for state in body.states())
        return own if self.drafter is None else own + self.drafter.states(self.hidden)

    # -- sizes, for the planner ---

    def state_layout(self, dtype: str, page: int = 1, draft_tokens: int = 0) -> StateLayout:
        key = dtype, page, draft_tokens
        if key not in self._layouts:
            self._layouts[key] = state_layout(self.states, dtype, page, draft_tokens)
        return self._layouts[key]

    @property
    def routed_experts(self) -> int:
        """Routed experts of all layers together."""
        return self.moe.experts.count * len(self.moe_layers)

    @property
    def expert_channels(self) -> int:
        """Channels of an expert's input and output."""
        return self.moe.experts.channels(self.hidden)

    @property
    def expert_params(self) -> int:
        """Weights of one routed expert."""
        return self.moe.experts.params(self.hidden)

    def expert_bytes(self, expert_format: str, stored: StoredFormat = UNQUANTISED.experts) -> int:
        """Packed bytes of one routed expert."""
        if expert_format != STORED:
            return int(self.expert_params * FORMAT_BYTES[expert_format])
        down = self.expert_channels * self.moe.experts.width
        cut = down * stored.cut_bytes(self.moe.experts.width) if self.shard.ranks > 1 else 0.0
        return int(self.expert_params * stored.bytes_per_weight + cut)

    @property
    def routed_params(self) -> int:
        """Weights of all routed experts of all layers."""
        return self.expert_params * self.routed_experts

    @cached_property
    def dense_params(self) -> int:
        """Weights that every token uses: attention, norms, routers, shared and dense MLPs, head; no embedding."""
        bodies = sum(body.params(self.hidden) for body in self.bodies) + _hyper_params(self)
        blocks = [block for layer in self.layers for block in layer.blocks]
        norms = 1 + len(blocks) + sum(block.post is not None for block in blocks)
        draft_model = self.drafter
        drafter = 0 if draft_model is None else draft_model.params(self.hidden) + draft_model.pair_params(self.vocab)
        return bodies + norms * self.hidden + head_rows(self).size * self.hidden + drafter

    @cached_property
    def shared_params(self) -> int:
        """Weights of all shared experts."""
        shared = self.moe.shared
        return 0 if shared is None else shared.params(self.hidden) * _loaded_moe_layers(self)

    @property
    def expert_bias_bytes(self) -> int:
        """Bytes of all routed experts' biases; a machine that computes some of them has all."""
        return self.moe.experts.bias_bytes(self.hidden) * len(self.moe_layers)

    def dense_bytes(self, dtype: str, stored: StoredFormats = UNQUANTISED, for_gpu: bool = False) -> int:
        """Packed bytes of all other weights, experts' biases included; those that are stored as codes stay so, unless
        dtype is float32, or a GPU has no kernels for them."""
        key = dtype, stored, for_gpu
        if key not in self._sums:
            self._sums[key] = _dense_bytes(self, dtype, stored, for_gpu) + self.expert_bias_bytes
        return self._sums[key]

    def weight_bytes(self, dtype: str, expert_format: str, stored: StoredFormats = UNQUANTISED) -> int:
        """Bytes of all packed weights; the embedding stays in the mapped file and is not counted."""
        experts = self.expert_bytes(expert_format, stored.experts) * self.moe.experts.count
        return self.dense_bytes(dtype, stored) + experts * _loaded_moe_layers(self)


def _dense_bytes(model: ModelConfig, dtype: str, stored: StoredFormats, for_gpu: bool) -> int:
    hyper, streams = _hyper_params(model), _hyper_bytes(model, DTYPE_BYTES[dtype])
    if not stored.dense_codes or dtype == "float32":
        return (model.dense_params - hyper) * DTYPE_BYTES[dtype] + streams
    kinds = stored.dense, stored.shared, stored.embedding
    dense, shared, embedding = (f.gpu_bytes_per_weight if for_gpu else f.bytes_per_weight for f in kinds)
    head = head_rows(model).size * model.hidden if model.tied_embeddings else 0
    others = model.dense_params - model.shared_params - head - number_params(model)
    numbers = (number_params(model) - hyper) * DTYPE_BYTES[dtype] + streams
    return int(others * dense + model.shared_params * shared + head * embedding) + numbers


def embedding_bytes(model: ModelConfig, dtype: str) -> int:
    """Bytes of the table of all tokens, as numbers."""
    return model.vocab * model.hidden * DTYPE_BYTES[dtype]


def head_rows(model: ModelConfig) -> Share:
    """Rows of the matrix that makes logits."""
    return model.shard.rows_of(model.vocab)


def number_params(model: ModelConfig) -> int:
    """Dense weights that are numbers however a checkpoint stores them: of heads' matrices, and what connects blocks."""
    mixers = (*model.mixers, *(layer.mixer for layer in _draft_layers(model)))
    heads = sum(cost_of(mixer).number_params for mixer in mixers if mixer is not None)
    pairs = 0 if model.drafter is None else model.drafter.pair_params(model.vocab)
    return heads + pairs + _hyper_params(model)


def layer_of(model: ModelConfig, index: int) -> Layer:
    """Draft layers count as those behind the last."""
    return (*model.layers, *_draft_layers(model))[index]


def _draft_layers(model: ModelConfig) -> tuple[Layer, ...]:
    """Those that are loaded."""
    return () if model.drafter is None else model.drafter.layers


def moe_index(model: ModelConfig, layer: int) -> int:
    """Which of the layers with experts it is; draft layers come behind them."""
    behind = layer - len(model.layers)
    return len(model.moe_layers) + behind if behind >= 0 else model.moe_layers.index(layer)


def drafts(model: ModelConfig, layer: int) -> bool:
    """Whether it is a draft layer's number."""
    return layer >= len(model.layers)


def draft_experts(model: ModelConfig) -> int:
    """Routed experts of draft layers that are loaded."""
    return model.moe.experts.count * (_loaded_moe_layers(model) - len(model.moe_layers))


def _loaded_moe_layers(model: ModelConfig) -> int:
    """With draft layers."""
    return len(model.moe_layers) + sum(layer.moe is not None for layer in _draft_layers(model))


def past_bytes(model: ModelConfig, dtype: str, context: int) -> int:
    """Bytes that a token reads of the pages of a context of so many tokens."""
    unread = sum(cost_of(mixer).unread(context) for mixer in model.mixers)
    return context * model.state_layout(dtype).token_bytes - unread * DTYPE_BYTES[dtype]


def _hyper_params(model: ModelConfig) -> int:
    """Weights of the streams between blocks, and after the last."""
    ends = sum(end.end_params(model.hidden) for end in _ends(model))
    return ends + sum(hyper.params(model.hidden) for hyper in _hypers(model))


def _hyper_bytes(model: ModelConfig, each: int) -> int:
    """each: of a number of the activations' type."""
    ends = sum(each * end.end_params(model.hidden) for end in _ends(model))
    return ends + sum(hyper.matrix_bytes(model.hidden, each) for hyper in _hypers(model))


def _hypers(model: ModelConfig) -> list[ResidualStreams]:
    layers = (*model.layers, *_draft_layers(model))
    return [block.hyper for layer in layers for block in layer.blocks if block.hyper is not None]


def _ends(model: ModelConfig) -> list[ResidualStreams]:
    """Ends of the model's streams, and of a draft layer's."""
    layers = (*model.layers[-1:], *_draft_layers(model))
    return [layer.hyper for layer in layers if layer.hyper is not None]


def rope_bytes(model: ModelConfig, context: int) -> int:
    """Bytes of the rotary tables for so many positions: float32 cosines and sines. Layers that turn alike share
    them."""
    ropes = {replace(rope, pairs="halves") for each in set(model.attentions) for rope in cost_of(each).ropes}
    return sum(2 * DTYPE_BYTES["float32"] * rope.dims // 2 for rope in ropes) * context


def _experts_of(moe: Moe | None) -> Moe | None:
    """Routing that must be the same in all layers: not whether ids name the experts, nor where an activation ends."""
    if moe is None:
        return None
    plain = moe.activated_by(SILU) if moe.experts.activation.gated else moe
    return replace(plain, router=replace(moe.router, table=False, has_bias=False))


def why_alone(model: ModelConfig) -> str:
    """Why its sequences run one at a time, without a prefix match; "": they do not."""
    return "" if model.foreign is None else model.foreign.why_single
