"""What a model is made of: a tuple of layers, each a tuple of blocks, each a mechanism with its own sizes.

Mechanisms have no family names. A family is data over them (`architectures/`); a new kind of layer is a new type here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal, Protocol

from tandem.config.mechanisms.hyper import Hyper
from tandem.config.mechanisms.shared_kv import SharedKv
from tandem.config.rope import Rope
from tandem.config.state import Array, Fold, Pages, State
from tandem.errors import ConfigError

DELTA_CHUNK = 64  # rows of a prompt that a GPU takes together
QkNorm = Literal["none", "head", "width"]


@dataclass(frozen=True, slots=True)
class Norm:
    """Root mean square norm. plus_one: w is stored, and 1 + w multiplies, before anything is rounded. wide: so does w
    itself."""

    eps: float
    plus_one: bool = False
    wide: bool = False


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
class Gqa:
    """Grouped-query attention. window: how many last tokens a token sees, itself included; 0: all."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    window: int = 0
    qk_norm: QkNorm = "none"  # of q and k, before they turn: per head, or over all heads at once
    norm: Norm = field(default=Norm(1e-6))
    qkv_bias: bool = False
    out_bias: bool = False
    clip: float = 0.0  # q, k, v are clamped to [-clip, clip]; 0: not
    sinks: bool = False  # a score of each head counts in the softmax and has no value
    gate: bool = (
        False  # the result times the sigmoid of a gate, which q's projection makes beside each query head
    )
    head_gate: bool = False  # each head's result times softplus of a number, which a projection of its own makes

    @property
    def scale(self) -> float:
        """Of the softmax."""
        return float(self.head_dim**-0.5)

    def params(self, hidden: int) -> int:
        gates = self.heads if self.gate else 0
        own = hidden * self.heads if self.head_gate else 0
        return hidden * (2 * (self.heads + self.kv_heads) + gates) * self.head_dim + own

    def states(self) -> tuple[State, ...]:
        shape = self.kv_heads, self.head_dim
        return (Pages((Array("k", shape), Array("v", shape))),)


@dataclass(frozen=True, slots=True)
class Index:
    """Which tokens a token looks at: of itself and all before it the `budget` best. A token's score for another is the
    weighted sum of what small heads of their own say, as far as it is positive (DeepSeek-V3.2's lightning indexer).

    reuse: the layer whose choice counts here, too; None: this one chooses, and keeps a key of every token.
    """

    heads: int
    dim: int  # of a head, and of the key that all share; the first `rope.dims` channels turn
    budget: int
    rope: Rope
    reuse: int | None = None
    eps: float = 1e-6  # of the keys' norm, which takes away their mean, too

    def params(self, hidden: int, q_rank: int) -> int:
        return 0 if self.reuse is not None else self.heads * (q_rank * self.dim + hidden) + hidden * self.dim


@dataclass(frozen=True, slots=True)
class QueryScale:
    """Queries of position p times 1 + beta * log(1 + floor(p / every)), as Llama 4 has it."""

    beta: float
    every: int

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"queries are scaled every {self.every} positions, which must be at least 1")

    def acts_within(self, positions: int) -> bool:
        """Whether any of the first `positions` is scaled."""
        return self.beta != 0 and positions > self.every


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): one latent and one rotary key per token are kept,
    from which the keys and values of all heads are made."""

    heads: int
    q_rank: int  # queries are made from a latent of this width; 0: straight from the hidden state
    kv_rank: int
    nope_dim: int  # of a query and key head: channels that are not turned …
    rope_dim: int  # … and that are; the key's are shared by all heads
    value_dim: int  # of a head
    rope: Rope
    bias: bool = False
    softmax_factor: float = 1.0
    norm: Norm = field(default=Norm(1e-6))
    index: Index | None = None  # a token looks at some others; None: at all before it
    query_scale: QueryScale | None = None

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def cached_dim(self) -> int:
        """Of a token: the rotary key, then the latent."""
        return self.rope_dim + self.kv_rank

    @property
    def scale(self) -> float:
        """Of the softmax."""
        return float(self.qk_dim**-0.5) * self.softmax_factor

    def params(self, hidden: int) -> int:
        q = hidden * self.q_rank + (self.q_rank or hidden) * self.heads * self.qk_dim
        index = 0 if self.index is None else self.index.params(hidden, self.q_rank)
        return index + q + hidden * self.cached_dim + self.head_params + self.heads * self.value_dim * hidden

    @property
    def head_params(self) -> int:
        """Of the matrices that make keys and values of a latent, which are numbers however they are stored."""
        return self.kv_rank * self.heads * (self.nope_dim + self.value_dim)

    def seen(self, context: int) -> int:
        """How many of so many tokens a token looks at."""
        return context if self.index is None else min(context, self.index.budget)

    @property
    def scored_channels(self) -> int:
        """Products that a token costs for each before it, where it chooses."""
        index = self.index
        return 0 if index is None or index.reuse is not None else index.heads * index.dim

    def states(self) -> tuple[State, ...]:
        latent = Array("latent", (1, self.cached_dim))
        if self.index is None or self.index.reuse is not None:
            return (Pages((latent,)),)
        return (Pages((latent, Array("index", (1, self.index.dim)))),)


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
        inputs = Array("inputs", (self.conv, self.channels))
        memory = Array("memory", (self.v_heads, self.k_dim, self.v_dim), "float32")
        return (Fold((inputs, memory)),)


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

    Scores are softmax or sigmoid of the logits, or the square root of their softplus. With `has_bias`, experts are
    chosen by score + bias, but weighted by the score alone (DeepSeek-V3). With `num_groups` > 1 only the best
    `top_groups` groups stay in the race; a group counts as its two best biased scores added (DeepSeek-V3, GLM-4.5), or
    with `group_score="max"` as its best (DeepSeek-V2). table: each token's id names its experts, and scores weigh them.
    """

    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax"
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


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of a layer: feed-forwards of equal shape. biases: of all their matrices."""

    count: int
    width: int
    activation: Activation = SILU
    biases: bool = False
    copied: bool = False  # numbers lie in the checkpoint in another order than kernels read

    def params(self, hidden: int) -> int:
        """Of one; biases are not counted."""
        return self.activation.matrices * hidden * self.width

    def bias_bytes(self, hidden: int) -> int:
        """Of all of them, float32, wherever experts are computed."""
        each = (self.activation.matrices - 1) * self.width + hidden
        return 4 * self.count * each if self.biases else 0


@dataclass(frozen=True, slots=True)
class Moe:
    """Router, routed experts, and a shared one that every token uses; shared_gate: times sigmoid(gate · x)."""

    router: Router
    experts: Experts
    shared: Dense | None = None
    shared_gate: bool = False

    def activated_by(self, how: Activation) -> Moe:
        """The same experts, routed and shared, with another activation."""
        shared = None if self.shared is None else replace(self.shared, activation=how)
        return replace(self, experts=replace(self.experts, activation=how), shared=shared)

    @property
    def fusible_shared(self) -> int:
        """How many routed-sized experts the shared expert equals; 0 when it has a gate or cannot be cut evenly."""
        width = self.experts.width
        if self.shared is None or self.shared_gate or not width or self.shared.width % width:
            return 0
        if self.experts.biases:
            return 0
        return self.shared.width // width if self.shared.activation == self.experts.activation else 0

    def params(self, hidden: int) -> int:
        """What every token uses."""
        return hidden * self.router.num_experts + (0 if self.shared is None else self.shared.params(hidden))

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
Mixer = Attention | DeltaRule
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
    """residual + body(norm(residual)); hyper: what stands for the residual and the sum."""

    body: Body
    norm: Norm
    hyper: Hyper | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """Blocks in the order in which they run."""

    blocks: tuple[Block, ...]

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
