"""`register`: what vLLM calls in each of its processes (entry point `vllm.general_plugins`).

Two methods of vLLM are wrapped. Its configuration is checked where it is made, so that what cannot work is said before
an engine starts. And a layer of experts asks for the method that computes it: with the option, that is ours.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from tandem.backends.vllm.options import OPTION, WHERE, check, wishes_of
from tandem.errors import ConfigError

KNOWN = "0.26 to 0.33"
ASKED = ("self", "prefix", "quant_config", "moe_config")
APPLIED = ("self", "layer", "x", "topk_weights", "topk_ids", "shared_experts", "shared_experts_input")


def register() -> None:
    """May be called several times."""
    from vllm.config import VllmConfig

    if hasattr(VllmConfig.__post_init__, OPTION):
        return
    why_not = _wrap_experts(frozenset(os.sched_getaffinity(0)))
    VllmConfig.__post_init__ = _checked(VllmConfig.__post_init__, why_not)


def _checked(original: Callable[..., None], why_not: str) -> Callable[..., None]:
    @wraps(original)
    def post_init(config: Any, *args: Any, **named: Any) -> None:
        original(config, *args, **named)
        if wishes_of(config) is not None:
            if why_not:
                raise ConfigError(why_not)
            check(config)

    setattr(post_init, OPTION, True)
    return post_init


def _wrap_experts(cpus: frozenset[int]) -> str:
    """cpus: those that vLLM may use, before it binds threads to some. Returns why this vLLM cannot be joined, or ""."""
    if why_not := seam_differs():
        return why_not
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    from tandem.backends.vllm.method import joined

    theirs = RoutedExperts._get_quant_method

    def ours(layer: Any, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        config = get_current_vllm_config()
        if wishes_of(config) is None:
            return theirs(layer, prefix, quant_config, moe_config)
        return joined(layer, prefix, moe_config, config, cpus, partial(theirs, layer, prefix, quant_config, moe_config))

    RoutedExperts._get_quant_method = ours
    return ""


def seam_differs() -> str:
    """The difference from known versions, in a sentence; "": none."""
    from vllm import __version__

    refusal = f"{WHERE}: vLLM {__version__} cannot be joined; known are {KNOWN}"
    try:
        from vllm.forward_context import get_forward_context  # noqa: F401
        from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    except ImportError as error:
        return f"{refusal}. It has no {error.name or error}"
    for method, names in ((_method(RoutedExperts, "_get_quant_method"), ASKED), (FusedMoEMethodBase.apply, APPLIED)):
        if method is None or tuple(inspect.signature(method).parameters) != names:
            return f"{refusal}. What is asked for {', '.join(names[1:])} there is not asked here"
    if _lacks_router():
        return f"{refusal}, on a CPU 0.32 and newer. There this one chooses and computes experts in one kernel"
    return ""


def _lacks_router() -> bool:
    """Older ones have a router for GPUs alone: on a CPU experts and router were one kernel."""
    from vllm.platforms import current_platform

    package = "vllm.model_executor.layers.fused_moe.router"
    return bool(current_platform.is_cpu()) and importlib.util.find_spec(f"{package}.cpu_router") is None


def _method(owner: type, name: str) -> Callable[..., Any] | None:
    return getattr(owner, name, None)
