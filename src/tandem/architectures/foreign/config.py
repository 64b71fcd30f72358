"""`foreign_config`: a family that Tandem has no code for, as far as it can be known without running it."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from tandem.architectures.foreign.gates import activation_of
from tandem.architectures.foreign.observe import AttentionCall, Observation, observe
from tandem.architectures.foreign.registry import why_not_installed
from tandem.architectures.foreign.skeleton import expert_modules, layer_of, skeleton
from tandem.errors import ConfigError
from tandem.mechanisms.experts.shape import Experts, Moe
from tandem.mechanisms.foreign.shape import Foreign
from tandem.mechanisms.router.shape import Router
from tandem.spec.activation import Activation
from tandem.spec.json_keys import JsonKeys
from tandem.spec.layers import Block, Layer
from tandem.spec.model_config import ForeignCode, ModelConfig
from tandem.spec.norm import Norm
from tandem.spec.state import Array, Fold, Pages, State

_EXPERTS = re.compile(r"experts|moe$", re.IGNORECASE)  # in the name of a module's class
UNGATED = 32  # rows that kernels take together, half of them for either part of what they know as gate and up
LONGEST = 1 << 17  # tokens, where a configuration names no limit
NORM = Norm(1e-6)  # whose numbers nobody asks: Transformers' modules have their own


def foreign_config(values: Mapping[str, Any], generation: JsonKeys) -> ModelConfig:
    """Model configuration from config.json's `values`, for a model that Transformers' modules run.

    Raises ConfigError naming what is missing: the package, the family, or a mechanism.
    """
    why = why_not_installed()
    if why:
        raise ConfigError(why)
    text = json.dumps(dict(values))
    model = skeleton(text)
    experts = expert_modules(model)
    if not experts:
        raise ConfigError(_why_no_experts(model))
    observation = observe(model)
    part = model.config.get_text_config()
    return ModelConfig(
        model_type=str(values["model_type"]),
        hidden=part.hidden_size,
        vocab=model.get_input_embeddings().weight.shape[0],
        layers=_layers(model, experts, observation),
        norm=NORM,
        tied_embeddings=bool(getattr(part, "tie_word_embeddings", False)),
        max_positions=getattr(part, "max_position_embeddings", None) or LONGEST,
        eos_ids=generation.integers("eos_token_id") or JsonKeys(values).integers("eos_token_id"),
        foreign=ForeignCode(text, observation.why_single),
    )


def _why_no_experts(model: Any) -> str:
    """Why no module of it lets others compute its experts."""
    kinds = sorted({kind for module in model.modules() if _EXPERTS.search(kind := type(module).__name__)})
    if not kinds:
        return "it has no experts, and Tandem is for models that have (Mixture of Experts)"
    return f"Transformers computes its experts in code of its own ({kinds[0]}), where Tandem's cannot stand in"


def _layers(model: Any, experts: dict[str, Any], observation: Observation) -> tuple[Layer, ...]:
    count, moe = model.config.get_text_config().num_hidden_layers, _moe(model, experts, observation)
    sparse = {layer_of(name) for name in experts}
    weights = _weights(model, experts)
    states = _states(model, observation, count)
    layers, hidden = [], hidden_size(model)
    for index in range(count):  # a block's norm is counted with it, a router with its experts
        extra = 2 * hidden + moe.params(hidden) if index in sparse else hidden
        code = Foreign(max(0, weights[index] - extra), states[index])
        blocks = (Block(code, NORM), Block(moe, NORM)) if index in sparse else (Block(code, NORM),)
        layers.append(Layer(blocks))
    return tuple(layers)


def hidden_size(model: Any) -> int:
    return int(model.config.get_text_config().hidden_size)


def _states(model: Any, observation: Observation, count: int) -> list[tuple[State, ...]]:
    """States of each layer. Where Transformers' own cache runs, pages are never written: they stand for its bytes, and
    a slot separates the answers of each request."""
    if observation.why_single:
        part = model.config.get_text_config()
        heads = getattr(part, "num_key_value_heads", None) or part.num_attention_heads
        size = getattr(part, "head_dim", None) or part.hidden_size // part.num_attention_heads
        pages = Pages((Array("transformers", (2, heads, size)),))
        own = Fold((Array("transformers", (1,), "float32"),))
        return [(pages, own), *[(pages,)] * (count - 1)]
    states: dict[int, tuple[State, ...]] = defaultdict(tuple)
    for call in observation.attention:
        states[layer_of(call.module)] += (pages_of(call),)
    return [states[index] for index in range(count)]


def pages_of(call: AttentionCall) -> Pages:
    return Pages((Array("k", (call.kv_heads, call.key_dim)), Array("v", (call.kv_heads, call.value_dim))))


def _weights(model: Any, experts: dict[str, Any]) -> dict[int, int]:
    """Parameters of each layer outside its experts, by its index."""
    inside, sums = tuple(f"{name}." for name in experts), defaultdict[int, int](int)
    for name, parameter in model.named_parameters():
        if not name.startswith(inside) and layer_of(name) >= 0:
            sums[layer_of(name)] += parameter.numel()
    return sums


def _moe(model: Any, experts: dict[str, Any], observation: Observation) -> Moe:
    shapes = {_shape(name, module) for name, module in experts.items()}
    if len(shapes) > 1:
        raise ConfigError("its experts differ between layers, which is not supported")
    count, width, hidden = shapes.pop()
    each = max(observation.top_k.values(), default=0) or _top_k(model.config.get_text_config())
    name, module = next(iter(experts.items()))
    latent = 0 if hidden == hidden_size(model) else hidden
    return Moe(Router(count, each), Experts(count, width, _activation(name, module), latent=latent))


def _top_k(part: Any) -> int:
    """Experts of a token, which a configuration calls by one of several names. Raises ConfigError where it has none."""
    names = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "num_experts_per_token")
    for name in names:
        if isinstance(number := getattr(part, name, None), int):
            return number
    raise ConfigError("its configuration does not say how many experts a token uses")


def _shape(name: str, module: Any) -> tuple[int, int, int]:
    """Experts, their width, and the size of the rows that they read."""
    if module.has_bias:
        raise ConfigError(f"{name}: experts with biases are not supported")
    count, first, second = module.down_proj.shape
    hidden, width = (second, first) if module.is_transposed else (first, second)
    if not module.has_gate and width % UNGATED:
        raise ConfigError(f"{name}: experts without a gate have a width of whole {UNGATED}s, not of {width}")
    return count, width, hidden


def _activation(name: str, module: Any) -> Activation:
    activation = activation_of(module)
    if activation is None:
        raise ConfigError(
            f"{name}: its activation is none of those that are known (SiLU, GELU, squared ReLU, clamped ones)"
        )
    return activation
