"""What a model is made of: a tuple of layers, each a tuple of blocks, each a mechanism with its own sizes.

Mechanisms have no family names. A family is data over them (`architectures/`); a new kind of layer is a new type here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal, Protocol

from tandem.config.norm import Norm
from tandem.config.rope import Rope
from tandem.config.state import Array, Fold, Pages, State
from tandem.errors import ConfigError
from tandem.mechanisms.channel_delta.shape import ChannelDelta
from tandem.mechanisms.latent.shape import Latent
from tandem.mechanisms.router.scores import SCORES
from tandem.mechanisms.shared_kv.shape import SharedKv
from tandem.mechanisms.short_conv.shape import ShortConv
from tandem.mechanisms.state_space.shape import StateSpace
from tandem.mechanisms.streams.shape import Hyper

DELTA_CHUNK = 64  # rows of a prompt that a GPU takes together
QkNorm = Literal["none", "head", "width", "turned"]
OwnGate = Literal["none", "softplus", "sigmoid"]


ActivationKind = Literal["silu", "gelu", "gelu_tanh", "swiglu_clamp", "swiglu_oai", "silu_clamp", "relu2"]


@dataclass(frozen=True, slots=True)
class Activation:
    """Of a feed-forward: what becomes of gate and up. alpha and limit: of the kinds that have them.

    "silu", "gelu" and "gelu_tanh": that of gate, times up. "swiglu_clamp": gate at most `limit`, up within it, then
    silu(gate) * up. "swiglu_oai": clamped likewise, then gate * sigmoid(alpha * gate) * (up + 1). "silu_clamp":
    silu(gate) at most `limit`, times up within it. "relu2": there is no gate; max(up, 0) squared.
    """

    kind: ActivationKind = "silu"
    alpha: float = 0.0
    limit: float = 0.0

    def __post_init__(self) -> None:
        if self.kind in ("swiglu_clamp", "swiglu_oai", "silu_clamp") and not self.limit > 0:
            raise ConfigError(f"the limit of a {self.kind} activation is {self.limit}, and must be above 0")

    @property
    def gated(self) -> bool:
        return self.kind != "relu2"

    @property
    def matrices(self) -> int:
        """Of a feed-forward."""
        return 3 if self.gated else 2


SILU = Activation()


@dataclass(frozen=True, slots=True)
class Values:
    """What a head's values differ in from a projection of its own, as wide as keys."""

    dim: int = 0  # of a head; 0: as keys
    scale: float = 1.0  # they are multiplied with it
    norm: bool = False  # each head passes a norm without weights, with the eps of q's and k's
    from_keys: bool = False  # they are made of keys before norm and rotation

    @property
    def plain(self) -> bool:
        """Whether they are kept as they were projected."""
        return self.scale == 1.0 and not self.norm and not self.from_keys


@dataclass(frozen=True, slots=True)
class Gqa:
    """Grouped-query attention. window: how many last tokens a token sees, itself included; 0: all."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    window: int = 0
    qk_norm: QkNorm = "none"  # of q and k, before they turn: per head, or over all heads at once; "turned": behind
    norm: Norm = field(default=Norm(1e-6))
    qkv_bias: bool = False
    out_bias: bool = False
    clip: float = 0.0  # q, k, v are clamped to [-clip, clip]; 0: not
    sinks: bool = False  # a score of each head counts in the softmax and has no value
    gate: bool = (
        False  # the result times the sigmoid of a gate, which q's projection makes beside each query head
    )
    own_gate: OwnGate = "none"  # the result times that of numbers, which a projection of its own makes ...
    gates_each: Literal["head", "channel"] = "head"  # ... one for each of these
    values: Values = field(default=Values())
    factor: float = 0.0  # of the softmax; 0: head_dim ** -0.5
    cached: str = "act"  # dtype of keys and values in pages
    kv_copies: int = 1  # so many neighbouring ranks have the same KV heads

    def __post_init__(self) -> None:
        if not 0 <= self.values.dim <= self.head_dim:
            raise ConfigError(
                f"config.json: values of {self.values.dim} channels are wider than keys of {self.head_dim}"
            )

    @property
    def scale(self) -> float:
        """Of the softmax."""
        return self.factor or float(self.head_dim**-0.5)

    @property
    def sees_all(self) -> bool:
        """Whether a token looks back farther than a window."""
        return self.window == 0

    @property
    def value_dim(self) -> int:
        """Of a head."""
        return self.values.dim or self.head_dim

    @property
    def gate_rows(self) -> int:
        """Of the projection that makes the gate; 0: there is none."""
        wide = self.heads * self.value_dim if self.gates_each == "channel" else self.heads
        return 0 if self.own_gate == "none" else wide

    def params(self, hidden: int) -> int:
        q = self.heads * (2 if self.gate else 1) * self.head_dim + self.gate_rows
        v = 0 if self.values.from_keys else self.kv_heads * self.value_dim
        return hidden * (q + self.kv_heads * self.head_dim + v + self.heads * self.value_dim)

    def states(self) -> tuple[State, ...]:
        k, v = (self.kv_heads, self.head_dim), (self.kv_heads, self.value_dim)
        return (Pages((Array("k", k, self.cached), Array("v", v, self.cached)), window=self.window),)


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """Gated delta net (arXiv 2412.06464): a memory of constant size instead of keys and values of all tokens.

    q, k and v pass a causal convolution over the last `conv` tokens. layout: how projections are stored: q, k, v and
    gate of each key head together ("heads"), or of all heads ("kinds").
    """

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv: int
    norm: Norm
    layout: Literal["heads", "kinds"]

    @property
    def channels(self) -> int:
        """Of the convolution: q, k, v."""
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim

    @property
    def values(self) -> int:
        return self.v_heads * self.v_dim

    @property
    def chunk_row_bytes(self) -> int:
        """What a prompt's row leaves between the GPU's kernels: q, k, v, results, and two numbers for each pair of rows
        of a chunk, in bfloat16; two gates in float32."""
        rows = 2 * self.k_heads * self.k_dim + 2 * self.values
        return 2 * rows + self.v_heads * (2 * 2 * DELTA_CHUNK + 2 * 4)

    @property
    def padded_head(self) -> int:
        """Elements of a head's memory on a GPU, where tiles have powers of two of at least 16."""
        return prod(max(16, 1 << (dim - 1).bit_length()) for dim in (self.k_dim, self.v_dim))

    def params(self, hidden: int) -> int:
        projections = self.channels + 2 * self.values + 2 * self.v_heads
        return hidden * projections + self.channels * self.conv

    def states(self) -> tuple[State, ...]:
        inputs = Array("inputs", (self.channels,)), Array("gates", (2 * self.v_heads,))
        memory = Array("memory", (self.v_heads, self.k_dim, self.v_dim), "float32")
        return (Fold((memory,), inputs, self.conv),)


@dataclass(frozen=True, slots=True)
class Dense:
    """A gated feed-forward that every token uses."""

    width: int
    activation: Activation = SILU

    def params(self, hidden: int) -> int:
        return self.activation.matrices * hidden * self.width

    def states(self) -> tuple[State, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class Router:
    """How gate logits become experts and weights.

    `score` names one of `SCORES`. With `has_bias`, experts are chosen by score + bias, but weighted by the score alone
    (DeepSeek-V3). With `num_groups` > 1 only the best
    `top_groups` groups stay in the race; a group counts as its two best biased scores added (DeepSeek-V3, GLM-4.5), or
    with `group_score="max"` as its best (DeepSeek-V2). table: each token's id names its experts, and scores weigh them.
    """

    num_experts: int
    top_k: int
    score: str = "softmax"
    normalize: bool = True  # divide the chosen weights by their sum
    scale: float = 1.0  # routed_scaling_factor, applied last
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["top2", "max"] = "top2"
    epsilon: float = 0.0  # added to the sum before dividing (1e-20 in DeepSeek and GLM)
    least_sum: float = 0.0  # the sum is at least this before dividing
    has_bias: bool = False  # the checkpoint has a selection bias per expert
    logits_bias: bool = False  # is added to the logits
    float32_logits: bool = False  # logits are computed in f32; else in the activations' dtype
    table: bool = False
    expert_scale: bool = False  # a chosen weight times a number of the expert, last

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise ConfigError(f"a router's score is {self.score!r}, and must be one of: {', '.join(SCORES)}")
        if self.group_score not in ("top2", "max"):
            raise ConfigError(f"a group of experts counts as {self.group_score!r}, and must as 'top2' or 'max'")


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of a layer: feed-forwards of equal shape. biases: of all their matrices. latent: two
    projections stand around all of them, and between these tokens have so many channels."""

    count: int
    width: int
    activation: Activation = SILU
    biases: bool = False
    copied: bool = False  # numbers lie in the checkpoint in another order than kernels read
    latent: int = 0

    def params(self, hidden: int) -> int:
        """Of one; biases are not counted."""
        return self.activation.matrices * self.channels(hidden) * self.width

    def channels(self, hidden: int) -> int:
        """Of what they take and give."""
        return self.latent or hidden

    def bias_bytes(self, hidden: int) -> int:
        """Of all of them, float32, wherever experts are computed."""
        each = (self.activation.matrices - 1) * self.width + hidden
        return 4 * self.count * each if self.biases else 0


@dataclass(frozen=True, slots=True)
class Beside:
    """A dense feed-forward that takes a block's input, while router and experts take the residual behind norms of their
    own. Its result and theirs pass a norm each before they are added. The router's norm has `factor` in its weights.
    """

    dense: Dense
    norm: Norm
    factor: float

    def params(self, hidden: int) -> int:
        return self.dense.params(hidden) + 4 * hidden


@dataclass(frozen=True, slots=True)
class Moe:
    """Router, routed experts, and a shared one that every token uses; shared_gate: times sigmoid(gate · x). apart: the
    shared one never counts as routed ones, since it differs from them in some layer."""

    router: Router
    experts: Experts
    shared: Dense | None = None
    shared_gate: bool = False
    beside: Beside | None = None
    apart: bool = False

    def activated_by(self, how: Activation) -> Moe:
        """The same experts, routed and shared, with another activation."""
        shared = None if self.shared is None else replace(self.shared, activation=how)
        return replace(self, experts=replace(self.experts, activation=how), shared=shared)

    @property
    def fusible_shared(self) -> int:
        """How many routed-sized experts the shared expert equals; 0 when it has a gate, differs or cannot be cut."""
        width = self.experts.width
        if self.shared is None or self.shared_gate or not width or self.shared.width % width:
            return 0
        if self.experts.biases or self.experts.latent or self.apart:
            return 0
        return self.shared.width // width if self.shared.activation == self.experts.activation else 0

    def params(self, hidden: int) -> int:
        """What every token uses."""
        shared = 0 if self.shared is None else self.shared.params(hidden)
        beside = 0 if self.beside is None else self.beside.params(hidden)
        scales = self.router.num_experts if self.router.expert_scale else 0
        around = 2 * hidden * self.experts.latent
        return hidden * self.router.num_experts + scales + shared + beside + around

    def states(self) -> tuple[State, ...]:
        return ()


NO_EXPERTS = Moe(Router(num_experts=0, top_k=0), Experts(count=0, width=0))
"""Of a model without experts."""

@dataclass(frozen=True, slots=True)
class Foreign:
    """What a layer does outside its experts, where code that is not ours does it. weights: all of it uses for a token;
    kept: of a sequence between steps."""

    weights: int
    kept: tuple[State, ...]

    def params(self, hidden: int) -> int:
        return self.weights

    def states(self) -> tuple[State, ...]:
        return self.kept


Attention = Gqa | Latent | SharedKv
Mixer = Attention | DeltaRule | ChannelDelta | ShortConv | StateSpace
Body = Mixer | Dense | Moe | Foreign


class Mechanism(Protocol):
    """What every body answers for itself."""

    def params(self, hidden: int) -> int:
        """Weights that every token uses."""
        ...

    def states(self) -> tuple[State, ...]:
        """What it keeps of a sequence between steps."""
        ...


@dataclass(frozen=True, slots=True)
class Block:
    """residual + body(norm(residual)); hyper: what stands for the residual and the sum; post: a norm of the body's
    result."""

    body: Body
    norm: Norm
    hyper: Hyper | None = None
    post: Norm | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """Blocks in the order in which they run. scaled: in the end the residual is multiplied with a stored number."""

    blocks: tuple[Block, ...]
    scaled: bool = False

    @property
    def hyper(self) -> Hyper | None:
        """What connects its blocks, all alike; None: one residual."""
        return self.blocks[0].hyper

    @property
    def moe(self) -> Moe | None:
        return next((block.body for block in self.blocks if isinstance(block.body, Moe)), None)

    @property
    def mixer(self) -> Mixer | None:
        return next((block.body for block in self.blocks if isinstance(block.body, Mixer)), None)


def pre_norm(mixer: Mixer, feed_forward: Dense | Moe, norm: Norm, hyper: Hyper | None = None) -> Layer:
    """The usual decoder layer: attention, then a feed-forward, each behind a norm of its own."""
    return Layer((Block(mixer, norm, hyper), Block(feed_forward, norm, hyper)))
