"""SGLang's own `kt_ep_wrapper.py`, read out of its wheels, driven against our `kt_kernel` with stand-ins for the rest.

`make test-vllm` fetches the wheels; nothing of them is kept in the repository.
"""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tandem.backends.kt import layer as kt_layer
from tiny import TinyModels

ROOT = Path(__file__).parents[2]
WHEELS = ROOT / ".cache" / "sglang"
FILE = "sglang/srt/layers/moe/kt_ep_wrapper.py"
EXPERTS, TOP_K, OWN, NUMBER = 12, 3, 4, 1
TOLERANCE = 2e-2  # bfloat16, as in test_kt_kernel.py


class Routed(NamedTuple):
    topk_weights: Tensor
    topk_ids: Tensor
    router_logits: Tensor | None = None


class Dispatched(NamedTuple):
    hidden_states: Tensor
    topk_output: Routed


class Combined(NamedTuple):
    hidden_states: Tensor


class GpuExperts:
    """SGLang's own experts: it asks Transformers' module, and skips the ids -1, as its kernels do."""

    def __init__(self, experts: torch.nn.Module) -> None:
        self._experts, self.ids = experts, Tensor()

    def create_weights(self, layer: object, num_experts: int, **_named: object) -> None:
        self.count = num_experts

    def create_moe_runner(self, layer: object, config: object) -> None: ...

    def apply(self, layer: object, dispatched: Dispatched) -> Combined:
        weights, ids, _ = dispatched.topk_output
        assert int(ids.max()) < self.count
        x, here = dispatched.hidden_states, ids >= 0
        with torch.inference_mode():
            out = self._experts(x.float(), ids.clamp(min=0), weights * here)
        return Combined(out.to(x.dtype))


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **contents: object) -> None:
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        parent = ".".join(parts[:end])
        if parent not in sys.modules:
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    for key, value in contents.items():
        monkeypatch.setattr(sys.modules[name], key, value, raising=False)


def stand_ins(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    """What the file imports of SGLang."""
    moe, schedule = SimpleNamespace(**settings), SimpleNamespace(chunked_prefill_size=512)
    location = SimpleNamespace(physical_to_logical_map_cpu=torch.arange(EXPERTS).repeat(3, 1))
    here = "sglang.srt"
    stand_in(monkeypatch, f"{here}.arg_groups.overrides", model_config_of=lambda args: args)
    stand_in(monkeypatch, f"{here}.layers.quantization.base_config", FusedMoEMethodBase=object)
    stand_in(
        monkeypatch, f"{here}.runtime_context", get_exec=lambda: SimpleNamespace(moe=moe),
        get_parallel=lambda: SimpleNamespace(tp_rank=0), get_schedule=lambda: schedule,
    )  # fmt: skip
    stand_in(monkeypatch, f"{here}.utils", get_compiler_backend=lambda: "eager")
    stand_in(monkeypatch, f"{here}.layers.moe.token_dispatcher", StandardCombineInput=Combined)
    plain = SimpleNamespace(format_is_bypassed=lambda _output: False)
    stand_in(monkeypatch, f"{here}.layers.moe.topk", TopKOutputChecker=plain)
    stand_in(
        monkeypatch, f"{here}.eplb.expert_location_dispatch", get_global_expert_location_metadata=lambda: location
    )
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device=None: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.fixture(params=["0.5.17", "0.5.23"])
def sglang(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[..., Any]]:
    """Its module, once it is known what its command line says."""
    wheel = next(WHEELS.glob(f"sglang-{request.param}-*.whl"), None)
    if wheel is None:
        pytest.skip(f"the wheel of sglang {request.param} is not in {WHEELS.relative_to(ROOT)}: make test-vllm")
    monkeypatch.syspath_prepend(str(ROOT / "packaging" / "kt_kernel"))
    monkeypatch.setattr(kt_layer, "_models", {})
    source = tmp_path / "kt_ep_wrapper.py"
    source.write_bytes(zipfile.ZipFile(wheel).read(FILE))

    def module(settings: dict[str, Any]) -> Any:
        stand_ins(monkeypatch, settings)
        spec = importlib.util.spec_from_file_location("kt_ep_wrapper", source)
        assert spec is not None and spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        return made

    yield module
    sys.modules.pop("kt_kernel", None)


def settings(path: Path, own: int) -> dict[str, Any]:
    """Fields of SGLang's command line."""
    return {
        "kt_weight_path": str(path), "kt_num_gpu_experts": own, "kt_cpuinfer": 2, "kt_threadpool_count": 1,
        "kt_method": "BF16", "kt_max_deferred_experts_per_token": None, "chunked_prefill_size": 512,
    }  # fmt: skip


@pytest.mark.parametrize("own", [0, OWN])
def test_its_layer_gives_all_experts_sum(sglang: Callable[..., Any], tiny_models: TinyModels, own: int) -> None:
    path = tiny_models["qwen3_moe"]
    given = settings(path, own)
    module = sglang(given)
    assert module.KTRANSFORMERS_AVAILABLE
    args = SimpleNamespace(hf_config=SimpleNamespace(num_hidden_layers=3), **given)
    args.get_hf_config = lambda: args.hf_config
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).float().model.layers[NUMBER].mlp.experts
    method = module.KTEPWrapperMethod(GpuExperts(theirs), module.create_kt_config_from_server_args(args, NUMBER))
    layer = SimpleNamespace(top_k=TOP_K, intermediate_size_per_partition=28, moe_tp_size=1)
    method.create_weights(layer, EXPERTS, 72, 28, torch.bfloat16)
    method.process_weights_after_loading(layer)
    method.create_moe_runner(layer, SimpleNamespace(activation="silu"))
    for rows in (1, 7):
        x, ids, weights = batch(rows)
        with torch.inference_mode():
            wanted = theirs(x.float(), ids, weights)
        got = method.apply(layer, Dispatched(x, Routed(weights, ids.clone()))).hidden_states
        assert got.dtype == x.dtype
        torch.testing.assert_close(got.float(), wanted, rtol=TOLERANCE, atol=TOLERANCE)


def batch(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rows)
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(rows)])
    return torch.randn(rows, 72).bfloat16(), ids, torch.rand(rows, TOP_K)
