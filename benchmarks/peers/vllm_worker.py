"""Functions that `vllm_engines.py` runs inside vLLM's worker, which is their first argument."""

from __future__ import annotations

import os
import statistics
from collections import Counter
from typing import Any

import torch

REPLAYS = 50


def joined_experts(worker: Any) -> Any:
    """Tandem's experts of a layer; None: vLLM computes its own."""
    for layer in worker.vllm_config.compilation_config.static_forward_context.values():
        method = getattr(getattr(layer, "routed_experts", None), "quant_method", None)
        if type(method).__name__ == "JoinedExperts":
            return method.experts.experts
    return None


def choose(worker: Any, graphs: str, cpu: int | None) -> None:
    """graphs: "full" or "piecewise", those that are replayed from now on. cpu: the worker's thread runs there alone;
    None: anywhere."""
    os.sched_setaffinity(0, range(os.cpu_count() or 1) if cpu is None else {cpu})
    dispatcher = getattr(worker.model_runner, "cudagraph_dispatcher", None)
    if dispatcher is None:
        return
    if not hasattr(dispatcher, "replayed"):
        dispatcher.every_full = set(full_graphs(dispatcher))
        dispatcher.dispatch = counting(dispatcher, dispatcher.dispatch)
    dispatcher.replayed = Counter()
    keys = full_graphs(dispatcher)
    keys.clear()
    keys.update(dispatcher.every_full if graphs == "full" else ())


def full_graphs(dispatcher: Any) -> set[Any]:
    return next(keys for mode, keys in dispatcher.cudagraph_keys.items() if mode.name == "FULL")


def counting(dispatcher: Any, dispatch: Any) -> Any:
    def dispatched(*arguments: Any, **named: Any) -> Any:
        result = dispatch(*arguments, **named)
        dispatcher.replayed[result[0].name.lower()] += 1
        return result

    return dispatched


def observed(worker: Any) -> dict[str, Any]:
    """Steps by the graphs that they replayed, since `choose`; posts and their experts, since the start."""
    dispatcher, experts = getattr(worker.model_runner, "cudagraph_dispatcher", None), joined_experts(worker)
    handoff = getattr(experts, "_handoff", None)
    used = handoff.used() if handoff is not None else (0, 0)
    return {"replayed": dict(getattr(dispatcher, "replayed", {})), "posts": used[0], "experts": used[1]}


def handoff_us(worker: Any, layers: int = 48) -> float:
    """Microseconds of a layer's hand-off in a CUDA graph when the CPU has nothing to compute."""
    from tandem.kernels.ops import Routing

    experts = joined_experts(worker)
    handoff, number = experts._handoff, experts._number
    sizes, device = handoff.sizes, handoff.device
    x = torch.zeros(1, sizes.hidden, dtype=torch.bfloat16, device=device)
    ids = torch.zeros(1, sizes.top_k, dtype=torch.int32, device=device)
    routing = Routing(ids, torch.zeros(1, sizes.top_k, device=device))
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(layers):
            handoff.post(number, x, routing, ids)  # slot 0: all of them are on the GPU
            handoff.collect(1)
    return statistics.median(replay_us(graph) for _ in range(REPLAYS)) / layers


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3
