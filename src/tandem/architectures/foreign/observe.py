"""Observation of a model's pass: layers that attend, their arguments, and other states that they keep.

The pass runs on the meta device: shapes are real, numbers are not. A layer that keeps anything but the keys and values
that it hands to attention cannot be paged.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tandem.architectures.foreign.hooks import answering
from tandem.architectures.foreign.masks import MaskReach, seen_through
from tandem.architectures.foreign.skeleton import layer_of

TOKENS = 4
PAGED_LAYERS = ("full_attention", "sliding_attention", "attention")  # of `layer_types`
UNDERSTOOD = frozenset(("scaling", "sliding_window", "softcap", "s_aux"))
HARMLESS = {
    "dropout": (0, 0.0), "is_causal": (None, True), "output_attentions": (None, False), "head_mask": (None,),
}  # fmt: skip
"""Arguments that change nothing with these values."""
BESIDE = frozenset((
    "position_ids", "cache_position", "use_cache", "logits_to_keep", "return_dict", "output_hidden_states",
    "output_router_logits", "past_key_values", "past_key_value", "position_embeddings", "layer_idx", "labels",
    "num_items_in_batch", "input_ids", "deterministic",
))  # fmt: skip
"""Arguments that are not attention's: models hand on what they were given."""
ASKED_FREELY = frozenset((
    "update", "get_seq_length", "get_mask_sizes", "get_query_offset", "get_max_length", "get_max_cache_shape",
    "is_compileable", "is_sliding", "is_linear", "is_dummy", "is_initialized", "layers", "layer_class_to_replicate",
    "offloading",
))  # fmt: skip
"""Attributes of Transformers' cache that say nothing about states of other kinds."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's attention. scale 0: of the key's size; softcap 0: none; window as in `MaskReach`."""

    module: str
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int
    softcap: float
    sinks: bool


@dataclass(slots=True)
class Observation:
    """why_single: why sequences cannot be packed, "": they can. top_k: of experts modules, by name; ran:
    names of modules."""

    attention: list[AttentionCall] = field(default_factory=list)
    top_k: dict[str, int] = field(default_factory=dict)
    ran: set[str] = field(default_factory=set)
    why_single: str = ""


def observe(model: Any) -> Observation:
    """One pass of a skeleton."""
    watch = _Watch(model)
    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.enter_context(_ObservedRun(watch.observation.ran, name, module))
        stack.enter_context(answering(watch))
        try:
            watch.run(model)
        except Unsupported as error:
            watch.observation.why_single = str(error)
        except Exception as error:  # a family's code may do anything
            why = f"its modules cannot be watched ({type(error).__name__}: {_first_line(error)})"
            watch.observation.why_single = why
    watch.observation.why_single = _known(model.config) or watch.observation.why_single or watch.left_out(model)
    return watch.observation


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


class Unsupported(Exception):
    """Attention that a model calls for, and that ours does not compute."""


class _ObservedRun:
    """Notes that a module was called."""

    def __init__(self, ran: set[str], name: str, module: Any) -> None:
        self._handle = module.register_forward_pre_hook(lambda *_: ran.add(name))

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._handle.remove()


class _Watch:
    """`Hooks` that compute nothing."""

    def __init__(self, model: Any) -> None:
        self.observation = Observation()
        self._names = {id(module): name for name, module in model.named_modules()}
        self._cap = getattr(model.config, "attn_logit_softcapping", None)
        self._kept: list[str] = []

    def run(self, model: Any) -> None:
        ids = torch.zeros((1, TOKENS), dtype=torch.int64, device="meta")
        positions = torch.arange(TOKENS, device="meta")[None]
        everything = torch.ones_like(ids)
        cache = watched_cache(self._kept)
        with torch.no_grad():
            model(
                input_ids=ids, position_ids=positions, attention_mask=everything, past_key_values=cache,
                use_cache=True,
            )  # fmt: skip

    def mask(self, arguments: dict[str, Any]) -> Any:
        return _Marker(seen_through(arguments["mask_function"]))

    def experts(self, module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if x.dim() != 2 or ids.dim() != 2:
            raise Unsupported(f"experts are given {x.dim()} dimensions")
        self.observation.top_k[self._names[id(module)]] = ids.shape[-1]
        return torch.empty_like(x)

    def attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, arguments: dict[str, Any]
    ) -> Tensor:
        self.observation.attention.append(self._call(module, q, k, v, mask, arguments))
        return q.new_empty((1, q.shape[2], q.shape[1], v.shape[3]))

    def _call(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, arguments: dict[str, Any]
    ) -> AttentionCall:
        name = self._names[id(module)]
        _check_arguments(name, arguments)
        if k.shape[2] != q.shape[2] or k.shape[:3] != v.shape[:3]:
            raise Unsupported(f"{name} attends to {k.shape[2]} keys of {q.shape[2]} tokens")
        sinks = arguments.get("s_aux") is not None
        if not sinks and any("sink" in each for each, _ in module.named_parameters(recurse=False)):
            raise Unsupported(f"{name} has sinks and does not hand them to attention")
        softcap = arguments.get("softcap") or 0.0
        if self._cap and not softcap:
            raise Unsupported(f"{name} does not hand its soft cap to attention")
        return AttentionCall(
            name, q.shape[1], k.shape[1], k.shape[3], v.shape[3], arguments.get("scaling") or k.shape[3] ** -0.5,
            _window(name, mask, arguments.get("sliding_window")), softcap, sinks,
        )  # fmt: skip

    def left_out(self, model: Any) -> str:
        """Why some layer is not paged; "": all are."""
        if self._kept:
            return f"its layers keep more than keys and values ({', '.join(dict.fromkeys(self._kept))})"
        twice = [name for name, n in Counter(call.module for call in self.observation.attention).items() if n > 1]
        if twice:
            return f"{twice[0]} attends more than once in a pass"
        layers = {layer_of(call.module) for call in self.observation.attention}
        missing = [i for i in range(_layer_count(model)) if i not in layers]
        return f"layer {missing[0]} does not attend through Transformers' interface" if missing else ""


class _Marker:
    """A mask that only says what it would let a token see."""

    def __init__(self, record: MaskReach) -> None:
        self.reported = record


def _window(name: str, mask: Any, argument: int | None) -> int:
    """Window of the mask, in tokens, which the argument must not contradict; 0: none."""
    if mask is None:
        return argument or 0
    if not isinstance(mask, _Marker):
        raise Unsupported(f"{name} makes a mask of its own")
    if mask.reported.wrong:
        raise Unsupported(f"{name} has {mask.reported.wrong}")
    if argument and argument != mask.reported.window:
        raise Unsupported(f"{name} says sliding_window={argument}, but its mask has {mask.reported.window}")
    return mask.reported.window


def _check_arguments(name: str, arguments: dict[str, Any]) -> None:
    for key, value in arguments.items():
        if key in UNDERSTOOD or key in BESIDE or value is None:
            continue
        if key not in HARMLESS or value not in HARMLESS[key]:
            raise Unsupported(
                f"{name} hands {key}={_shown(value)} to attention, which Tandem's does not know"
            )


def _shown(value: Any) -> str:
    return f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:40]


def _layer_count(model: Any) -> int:
    return int(model.config.get_text_config().num_hidden_layers)


def _known(config: Any) -> str:
    """Reason in a configuration that its layers cannot be paged; "": none.

    Some rotations depend on the longest sequence of a pass, which is another one's in a packed batch.
    """
    text = config.get_text_config()
    kinds = {kind for kind in getattr(text, "layer_types", None) or () if kind not in PAGED_LAYERS}
    if kinds:
        return f"its layers keep states of their own ({', '.join(sorted(kinds))})"
    rope = getattr(text, "rope_parameters", None) or {}
    each = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    changing = [kind for part in each if (kind := part.get("rope_type")) in ("dynamic", "longrope")]
    return f"its rotation ({changing[0]}) depends on the length of the sequence" if changing else ""


def watched_cache(states: list[str]) -> Any:
    """A cache of Transformers that holds nothing and notes in `states` which states are asked of it."""
    from transformers.cache_utils import Cache

    class Watched(Cache):
        def __getattribute__(self, name: str) -> Any:
            if not name.startswith("_") and name not in ASKED_FREELY:
                states.append(name)
            return super().__getattribute__(name)

        def update(
            self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
        ) -> tuple[Tensor, Tensor]:
            return key_states, value_states

        def get_mask_sizes(self, query_length: Any, *_: Any, **__: Any) -> tuple[int, int]:
            return TOKENS, 0

    return Watched(layers=[])


def linears(model: Any) -> dict[str, nn.Linear]:
    """Plain matrices by name."""
    return {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
