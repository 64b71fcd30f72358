"""`JoinedExperts`: vLLM's method of a layer whose experts are Tandem's.

The tensors that vLLM would load are made on the device `meta`: they have names and shapes for vLLM's loader, and no
memory. What it finds in the checkpoint for them is let go unread, for Tandem reads the same files itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.models.utils import extract_layer_index

from tandem.backends import Host, LayerExperts, ModelExperts
from tandem.backends.vllm.options import WHERE, engine_config
from tandem.errors import ConfigError
from tandem.spec.shard import RankShard

_log = init_logger("vllm.plugins.tandem")


class VllmModelLayers:
    """All layers of one vLLM model in this process. Its files are opened when the first one is loaded."""

    def __init__(self, config: Any, cpus: frozenset[int]) -> None:
        self.config, self._cpus = config, cpus
        self._model: ModelExperts | None = None
        self.numbers = set[int]()

    def load(self, number: int, shard: RankShard) -> LayerExperts:
        if self._model is None:
            rows = self.config.scheduler_config.max_num_batched_tokens
            own = _device().type == "cpu" and self._cpus != os.sched_getaffinity(os.getppid())  # vLLM has bound it
            graphs = getattr(self.config.compilation_config, "max_cudagraph_capture_size", None) or 0
            loads = frozenset(self.numbers)
            dummy = self.config.load_config.load_format == "dummy"
            host = Host(shard, _device(), max(rows, graphs), graphs, self._cpus, own, loads, made_up=dummy)
            self._model = ModelExperts(engine_config(self.config), host)
            shared = "a core is left to" if self._model.leaves_core else "the same CPUs may run"
            _log.info("experts: %s; %s vLLM's own threads", self._model.text(), shared)
        return self._model.layer(number)


_joined: list[VllmModelLayers] = []


def joined(
    layer: Any, prefix: str, moe: Any, config: Any, cpus: frozenset[int], theirs: Callable[[], Any]
) -> Any:
    """The method of a layer that is being made, in place of what `theirs` makes. Raises ConfigError for what cannot be
    joined."""
    _check(layer, prefix, moe)
    if not _joined or _joined[-1].config is not config:
        _joined[:] = [VllmModelLayers(config, cpus)]
    layer.weight_loader = _loaded  # of this layer: classes of layers have their own
    return JoinedExperts(moe, _named(theirs, moe), prefix, _joined[-1])


def _named(theirs: Callable[[], Any], moe: Any) -> Any:
    """The method that names a layer's tensors; where vLLM has no kernels for them here, those of numbers."""
    try:
        return theirs()
    except (RuntimeError, ValueError) as error:
        _log.info_once("vLLM has no experts of its own for this model here: %s", error)
        method = UnquantizedFusedMoEMethod.__new__(UnquantizedFusedMoEMethod)
        FusedMoEMethodBase.__init__(method, moe)
        return method


def _loaded(*_args: Any, return_success: bool = False, **_named: Any) -> bool | None:
    """In place of a layer's `weight_loader`: the tensor is let go."""
    return True if return_success else None


_loaded.supports_moe_loading = True  # type: ignore[attr-defined]


class JoinedExperts(FusedMoEMethodBase):
    """theirs: says which tensors vLLM's loader will look for."""

    def __init__(self, moe: Any, theirs: FusedMoEMethodBase, prefix: str, group: VllmModelLayers) -> None:
        super().__init__(moe)
        self._theirs, self._group, self.prefix = theirs, group, prefix
        self._number = extract_layer_index(prefix)
        group.numbers.add(self._number)
        self.experts: LayerExperts | None = None

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        with torch.device("meta"):
            self._theirs.create_weights(layer, *args, **kwargs)
        for _, parameter in _unread(layer):
            parameter.weight_loader = _loaded

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Reads the layer's experts, once."""
        for name, parameter in _unread(layer):
            layer.register_parameter(name, nn.Parameter(parameter.new_empty(0, device="cpu"), requires_grad=False))
        if self.experts is not None:
            return
        parallel = self.moe.moe_parallel_config
        self.experts = self._group.load(self._number, RankShard(parallel.tp_rank, parallel.tp_size))
        self._check_same(self.experts)

    def _check_same(self, experts: LayerExperts) -> None:
        """That both engines speak of the same layer."""
        theirs = self.moe.num_experts, self.moe.hidden_dim
        if theirs != (experts.count, experts.hidden):
            raise ConfigError(
                f"{WHERE}: {self.prefix} has {theirs[0]} experts of {theirs[1]} channels in vLLM, and {experts.count} "
                f"of {experts.hidden} in the files"
            )

    def get_fused_moe_quant_config(self, layer: nn.Module) -> None:
        return None

    @property
    def is_monolithic(self) -> bool:
        return False

    @property
    def topk_indices_dtype(self) -> torch.dtype:
        return torch.int32

    def apply(
        self,
        layer: nn.Module,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """vLLM computes shared experts itself, and sums what ranks give."""
        result: Tensor = torch.ops.tandem.experts(x, topk_weights, topk_ids, self.prefix)
        return result


@torch.library.custom_op("tandem::experts", mutates_args=())
def experts(x: Tensor, weights: Tensor, ids: Tensor, layer: str) -> Tensor:
    """torch.compile does not look inside. layer: its name; vLLM knows which model of that name is running."""
    method = get_forward_context().no_compile_layers[layer].routed_experts.quant_method
    result: Tensor = method.experts(x, ids, weights)
    return result.clone() if result is x else result


@experts.register_fake
def _(x: Tensor, weights: Tensor, ids: Tensor, layer: str) -> Tensor:
    return torch.empty_like(x)


def _unread(layer: nn.Module) -> list[tuple[str, Any]]:
    """A layer's parameters that are Tandem's. A router's bias, which is here as well, is not among them."""
    return [(name, each) for name, each in layer.named_parameters(recurse=False) if each.is_meta]


def _device() -> torch.device:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return torch.device("cpu")
    if current_platform.is_cuda():
        return torch.device("cuda", torch.cuda.current_device())
    raise ConfigError(f"{WHERE}: experts run beside a CPU or an NVIDIA GPU, not on {current_platform.device_name}")


def _check(layer: Any, prefix: str, moe: Any) -> None:
    parallel = moe.moe_parallel_config
    reasons = []
    if parallel.use_ep or parallel.dp_size > 1 or parallel.is_sequence_parallel:
        reasons.append("experts are divided by their width alone, and rows not at all: take --tensor-parallel-size")
    if layer.expert_map_manager.num_fused_shared_experts:
        reasons.append("vLLM would count shared experts as routed ones: switch that fusion off")
    if layer.apply_router_weight_on_input:
        reasons.append("this model weighs inputs of experts, which Tandem weighs by results: leave the option out")
    if reasons:
        raise ConfigError(*(f"{WHERE}: {prefix}: {reason}" for reason in reasons))
