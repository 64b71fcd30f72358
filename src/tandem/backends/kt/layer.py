"""`KtLayer`: a layer's experts as SGLang asks `kt_kernel` for them, in both of the forms that it has.

SGLang gives the number of its own experts, which are the first; the fork sglang-kt a mask of them, which it changes
while serving. What it computes itself is left out here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from tandem.backends.host import Host
from tandem.backends.kt.installed import known_faults
from tandem.backends.model_experts import LayerExperts, ModelExperts
from tandem.backends.options import experts_config
from tandem.checkpoint.metadata.kt_packed import check_not_kt_packed
from tandem.errors import ConfigError, EngineError

_log = logging.getLogger("kt_kernel")

WHERE = "kt_kernel"
METHODS = {"LLAMAFILE": None, "MXFP8": None, "MOE_INT4": "INT4", "MOE_INT8": "INT8"}
"""Those that have another name here; None: what the files hold."""

_models: dict[tuple[object, ...], ModelExperts] = {}
_logged: set[int] = set()  # models of which the log has heard

WHOLE_PROMPTS, BESIDE = 16384, 1024
"""Rows of a batch where prompts are not cut into chunks; and those that decode beside a chunk."""


@dataclass(frozen=True)
class LayerRequest:
    """A layer as SGLang describes it. Sizes are whole: one process computes all ranks' part."""

    layer_idx: int
    num_experts: int
    num_experts_per_tok: int
    hidden_size: int
    moe_intermediate_size: int
    cpuinfer_threads: int
    threadpool_count: int
    weight_path: str
    chunked_prefill_size: int
    num_gpu_experts: int = 0
    gpu_experts_mask: Tensor | None = None
    method: str = "AMXINT4"
    max_deferred_experts_per_token: int | None = None
    numa_nodes: Sequence[int] | None = None
    mode: str = "inference"
    cpu_save: bool = False
    swiglu_limit: float = 0.0
    swiglu_alpha: float = 0.0

    @property
    def masked(self) -> bool:
        return self.gpu_experts_mask is not None

    def check(self) -> None:
        """Raises ConfigError for what is not offered."""
        if self.mode != "inference":
            raise ConfigError(f"{WHERE}: mode={self.mode!r} trains or adds adapters; this module serves: leave it out")
        if self.cpu_save:
            raise ConfigError(f"{WHERE}: cpu_save writes packed files; use `kt convert`")
        if self.num_gpu_experts > self.num_experts:
            raise ConfigError(f"{WHERE}: --kt-num-gpu-experts {self.num_gpu_experts} is more than a layer has")
        check_not_kt_packed(Path(self.weight_path))


class KtLayer:
    """Made for a layer, loaded later, then asked for batches: `submit_forward`, `sync_forward`, in turns."""

    _capture_sizes: ClassVar[list[int]] = []
    _waiting: ClassVar[KtLayer | None] = None  # whose batch is under way: one at a time in a process

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """By keywords, as SGLang does. Raises ConfigError."""
        try:
            self.request = LayerRequest(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(f"{WHERE}: this SGLang asks for what is not known here: {error}") from error
        self.request.check()
        self.layer_idx, self.num_experts = self.request.layer_idx, self.request.num_experts
        self.num_gpu_experts = self.request.num_gpu_experts
        self.gpu_experts_mask = _own_mask(self.request.gpu_experts_mask)  # changed in place while serving
        self._mask: Tensor | None = None  # on the device of batches
        self._experts: LayerExperts | None = None
        self._ticket: Any = None

    def load_weights(self, physical_to_logical_map_cpu: Tensor) -> None:
        """Reads the layer. Raises ConfigError where experts have copies or other places."""
        identity = torch.arange(self.num_experts)
        if not torch.equal(physical_to_logical_map_cpu.long().cpu(), identity):
            raise ConfigError(f"{WHERE}: experts keep their places here: leave --enable-eplb and their locations out")
        model = _model_of(self.request)
        self._experts = model.layer(self.layer_idx)
        _check_same(self.request, model)
        if id(model) not in _logged:
            _logged.add(id(model))
            _log_once(self.request, model)

    def submit_forward(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, cuda_stream: int) -> None:
        """In the stream's order: ids may be changed afterwards. cuda_stream: the current one. Raises EngineError."""
        if self._experts is None:
            raise EngineError("kt_kernel: load_weights comes before submit_forward")
        if KtLayer._waiting is not None:
            raise EngineError("kt_kernel: one batch at a time: leave --enable-two-batch-overlap out")
        x = hidden_states.view(-1, hidden_states.shape[-1])
        x = x if x.dtype in (torch.bfloat16, torch.float32) else x.to(torch.bfloat16)
        self._ticket = self._experts.submit(x, topk_ids, topk_weights, self._skip_mask(x.device))
        KtLayer._waiting = self

    def sync_forward(self, hidden_states: Tensor, cuda_stream: int) -> Tensor:
        """The sum of these experts, of the shape and dtype of hidden_states."""
        if self._experts is None or KtLayer._waiting is not self:
            raise EngineError("kt_kernel: submit_forward comes before sync_forward")
        KtLayer._waiting, self._ticket, ticket = None, None, self._ticket
        return self._experts.wait(ticket).view(hidden_states.shape).to(hidden_states.dtype)

    def forward(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, cuda_stream: int) -> Tensor:
        self.submit_forward(hidden_states, topk_ids, topk_weights, cuda_stream)
        return self.sync_forward(hidden_states, cuda_stream)

    def _skip_mask(self, device: torch.device) -> Tensor | None:
        """SGLang's own experts, as its mask says when the stream gets here: a graph copies it anew whenever it is
        replayed. No copy is under way while the mask changes: sglang-kt waits for the whole GPU before, in `apply`. It
        has to, for kt-kernel's threads read the mask while they compute. A copy of what holds at the call would be no
        safer: a graph's call is its capture."""
        if self.gpu_experts_mask is None or device.type == "cpu":
            return self.gpu_experts_mask
        if self._mask is None:
            self._mask = torch.empty_like(self.gpu_experts_mask, device=device)
        return self._mask.copy_(self.gpu_experts_mask, non_blocking=True)

    def submit_write_weight_scale_to_buffer(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(
            f"{WHERE}: experts are not streamed to SGLang's GPU: leave --kt-gpu-prefill-token-threshold out"
        )

    sync_write_weight_scale_to_buffer = submit_write_weight_scale_to_buffer

    def load_weights_from_tensors(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(f"{WHERE}: experts are read from files: give --kt-weight-path")

    @classmethod
    def set_capture_batch_sizes(cls, capture_bs: Sequence[int]) -> None:
        """Any size is taken: nothing is made for these."""
        cls._capture_sizes = list(capture_bs)

    @classmethod
    def get_capture_batch_sizes(cls) -> list[int]:
        return cls._capture_sizes

    @staticmethod
    def clear_buffer_cache() -> None:
        """There is none."""


def _own_mask(mask: Tensor | None) -> Tensor | None:
    """A copy that a GPU can read at any time."""
    if mask is None:
        return None
    own = torch.empty(mask.shape, dtype=torch.bool, device="cpu", pin_memory=torch.cuda.is_available())
    return own.copy_(mask)


def _model_of(spec: LayerRequest) -> ModelExperts:
    """One for all layers that are wanted alike."""
    method = METHODS.get(spec.method, spec.method)
    options = {
        "kt_method": method, "kt_cpuinfer": spec.cpuinfer_threads, "kt_threadpool_count": spec.threadpool_count,
        "kt_numa_nodes": None if spec.numa_nodes is None else list(spec.numa_nodes),
    }  # fmt: skip
    skipped = 0 if spec.masked else spec.num_gpu_experts
    key = spec.weight_path, skipped, *map(str, options.values())
    if key not in _models:
        flags = {name: value for name, value in options.items() if value is not None}
        config = experts_config(spec.weight_path, flags, "bfloat16", WHERE)
        chunk = spec.chunked_prefill_size
        rows = chunk + BESIDE if chunk > 0 else WHOLE_PROMPTS
        _models[key] = ModelExperts(config, Host(device=_device(), most_rows=rows, skipped=skipped))
    return _models[key]


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _check_same(spec: LayerRequest, model: ModelExperts) -> None:
    moe = model.config.moe
    ours = moe.experts.count, model.config.expert_channels, moe.experts.width
    theirs = spec.num_experts, spec.hidden_size, spec.moe_intermediate_size
    if ours != theirs:
        raise ConfigError(
            f"{WHERE}: SGLang has {theirs[0]} experts of {theirs[1]} x {theirs[2]} in layer {spec.layer_idx}, "
            f"--kt-weight-path {spec.weight_path} {ours[0]} of {ours[1]} x {ours[2]}; if one of SGLang's is a shared "
            "expert, give --disable-shared-experts-fusion"
        )


def _log_once(spec: LayerRequest, model: ModelExperts) -> None:
    _log.warning("experts: %s", model.text())
    if spec.max_deferred_experts_per_token:
        _log.warning("--kt-max-deferred-experts-per-token changes nothing: no expert is deferred")
    own = int(spec.gpu_experts_mask.sum()) if spec.gpu_experts_mask is not None else spec.num_gpu_experts
    for fault in known_faults(own, model.config.moe.router.scale, spec.masked):
        _log.warning("%s", fault)


def generate_gpu_experts_masks(activation_freq: Tensor, num_gpu_experts: int) -> Tensor:
    """The most used pairs of counts [layers, experts]: bool, in CPU memory."""
    flat = activation_freq.flatten().cpu()
    most = flat.topk(min(max(num_gpu_experts, 0), len(flat))).indices
    return torch.zeros(len(flat), dtype=torch.bool).index_fill_(0, most, True).view(activation_freq.shape)
