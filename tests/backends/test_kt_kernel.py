"""The module `kt_kernel`: both forms of its calls, in the order in which SGLang makes them."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tandem.backends.kt import installed as beside
from tandem.backends.kt import layer
from tandem.errors import ConfigError, EngineError, TandemError
from tiny import TinyModels

PACKAGE = Path(__file__).parents[2] / "packaging" / "kt_kernel"
EXPERTS, HIDDEN, WIDTH, TOP_K, OWN = 12, 72, 28, 3, 4  # of the tiny qwen3_moe; OWN: SGLang's
SAME = torch.arange(EXPERTS)
STREAM = 0
TOLERANCE = 2e-2  # x, activations and sums are bfloat16, which has 8 bits: some 2 ** -8 each, of values about 1


@pytest.fixture
def kt_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Imported as SGLang does."""
    monkeypatch.syspath_prepend(str(PACKAGE))
    monkeypatch.setattr(layer, "_models", {})
    monkeypatch.setattr(layer, "_logged", set())
    monkeypatch.setattr(layer.KtLayer, "_waiting", None)
    yield importlib.import_module("kt_kernel")
    sys.modules.pop("kt_kernel")


def wanted(path: Path, **more: Any) -> dict[str, Any]:
    return {
        "layer_idx": 1, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "hidden_size": HIDDEN,
        "moe_intermediate_size": WIDTH, "cpuinfer_threads": 2, "threadpool_count": 1, "weight_path": str(path),
        "chunked_prefill_size": 512, "method": "BF16", "max_deferred_experts_per_token": 0,
    } | more  # fmt: skip


def batch(rows: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(5)
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(rows)])
    return torch.randn(rows, HIDDEN).bfloat16(), ids, torch.rand(rows, TOP_K)


def right(path: Path, here: Tensor) -> Tensor:
    """What experts for which `here` bool [experts] holds add, by Transformers' module."""
    x, ids, weights = batch()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).float().model
    with torch.inference_mode():
        return model.layers[1].mlp.experts(x.float(), ids, weights * here[ids])


def close(got: Tensor, wanted: Tensor) -> None:
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), wanted, rtol=TOLERANCE, atol=TOLERANCE)


def test_the_first_experts_are_the_engines_own(kt_kernel: ModuleType, tiny_models: TinyModels) -> None:
    path = tiny_models["qwen3_moe"]
    experts = kt_kernel.KTMoEWrapper(**wanted(path, num_gpu_experts=OWN))
    experts.load_weights(SAME)
    x, ids, weights = batch()
    experts.submit_forward(x, ids, weights, STREAM)
    ids[ids >= OWN] = -1  # which SGLang does meanwhile
    close(experts.sync_forward(x, STREAM), right(path, SAME >= OWN))


def test_a_mask_is_followed_as_it_changes(kt_kernel: ModuleType, tiny_models: TinyModels) -> None:
    path, mask = tiny_models["qwen3_moe"], torch.zeros(EXPERTS, dtype=torch.bool)
    mask[[0, 3, 7]] = True
    experts = kt_kernel.KTMoEWrapper(**wanted(path, gpu_experts_mask=mask, swiglu_limit=0.0, swiglu_alpha=0.0))
    experts.load_weights(SAME)
    close(experts.forward(*batch(), STREAM), right(path, ~mask))
    experts.gpu_experts_mask.copy_(~mask)
    x, ids, weights = batch()
    experts.submit_forward(x, ids, weights, STREAM)
    experts.gpu_experts_mask.copy_(mask)  # of the next batch
    close(experts.sync_forward(x, STREAM), right(path, mask))


def test_padded_rows_have_no_expert(kt_kernel: ModuleType, tiny_models: TinyModels) -> None:
    experts = kt_kernel.KTMoEWrapper(**wanted(tiny_models["qwen3_moe"], num_gpu_experts=0))
    experts.load_weights(SAME)
    x, ids, weights = batch()
    whole = experts.forward(x, ids, weights, STREAM)
    ids[4:] = -1
    padded = experts.forward(x, ids, weights, STREAM)
    assert torch.equal(padded[:4], whole[:4]) and not padded[4:].any()


def test_results_have_the_dtype_of_rows(kt_kernel: ModuleType, tiny_models: TinyModels) -> None:
    experts = kt_kernel.KTMoEWrapper(**wanted(tiny_models["qwen3_moe"]))
    experts.load_weights(SAME)
    x, ids, weights = batch()
    for dtype in (torch.float16, torch.float32):
        assert experts.forward(x.to(dtype), ids.int(), weights.double(), STREAM).dtype == dtype


def test_layers_share_threads_and_files(kt_kernel: ModuleType, tiny_models: TinyModels) -> None:
    for number in range(3):
        kt_kernel.KTMoEWrapper(**wanted(tiny_models["qwen3_moe"], layer_idx=number)).load_weights(SAME)
    assert len(layer._models) == 1


def test_what_it_offers_beside(kt_kernel: ModuleType) -> None:
    kt_kernel.KTMoEWrapper.set_capture_batch_sizes([1, 2])
    assert kt_kernel.KTMoEWrapper.get_capture_batch_sizes() == [1, 2]
    counts = torch.tensor([[0.1, 0.5, 0.3, 0.8], [0.2, 0.4, 0.9, 0.1]])
    assert kt_kernel.generate_gpu_experts_masks(counts, 3).nonzero().tolist() == [[0, 1], [0, 3], [1, 2]]
    assert not hasattr(kt_kernel.kt_kernel_ext, "FP8LayerwiseTransport")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"mode": "sft"}, "leave it out"),
        ({"num_gpu_experts": 13}, "--kt-num-gpu-experts 13 is more"),
        ({"numa_nodes": [77]}, "node 77 has no core"),
        ({"num_experts": 13, "num_gpu_experts": 0}, "--disable-shared-experts-fusion"),
        ({"method": "NVFP4"}, "leave the flag out"),
        ({"layer_idx": 3}, "draft layers are not among them"),
        ({"new_parameter": 1}, "new_parameter"),
    ],
)
def test_what_cannot_be_is_said(
    kt_kernel: ModuleType, tiny_models: TinyModels, changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(TandemError, match=said):
        made = kt_kernel.KTMoEWrapper(**wanted(tiny_models["qwen3_moe"], **changed))
        made.load_weights(torch.arange(made.num_experts))


def test_calls_out_of_turn_are_refused(kt_kernel: ModuleType, tiny_models: TinyModels) -> None:
    experts = kt_kernel.KTMoEWrapper(**wanted(tiny_models["qwen3_moe"]))
    with pytest.raises(EngineError, match="load_weights comes before"):
        experts.submit_forward(*batch(), STREAM)
    with pytest.raises(ConfigError, match="--enable-eplb"):
        experts.load_weights(SAME.flip(0))
    experts.load_weights(SAME)
    with pytest.raises(EngineError, match="submit_forward comes before"):
        experts.sync_forward(batch()[0], STREAM)
    experts.submit_forward(*batch(), STREAM)
    another = kt_kernel.KTMoEWrapper(**wanted(tiny_models["qwen3_moe"], layer_idx=2))
    another.load_weights(SAME)
    for each in (experts, another):
        with pytest.raises(EngineError, match="--enable-two-batch-overlap"):
            each.submit_forward(*batch(), STREAM)
    with pytest.raises(ConfigError, match="--kt-gpu-prefill-token-threshold"):
        experts.submit_write_weight_scale_to_buffer(1)


def test_packed_files_of_the_original_are_refused(kt_kernel: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "weights" / "_layer_0" / "_numa_0"
    folder.mkdir(parents=True)
    (folder / "INT4_down_7_123Byte_quant_.kt").touch()
    with pytest.raises(ConfigError, match="kt convert"):
        kt_kernel.KTMoEWrapper(**wanted(tmp_path / "weights"))


def test_it_is_not_beside_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PACKAGE))
    monkeypatch.setattr(beside, "version", lambda name: {"kt-kernel": "0.7.2"}[name])
    with pytest.raises(ConfigError, match="pip uninstall kt-kernel"):
        importlib.import_module("kt_kernel")


def test_faults_of_sglang_are_told(
    kt_kernel: ModuleType, tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    location = ModuleType("expert_location")
    location.get_global_expert_location_metadata = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.eplb.expert_location", location)
    more = {"num_gpu_experts": OWN, "max_deferred_experts_per_token": 2}
    made = kt_kernel.KTMoEWrapper(**wanted(tiny_models["deepseek_v3"], **more))
    with caplog.at_level(logging.WARNING, logger="kt_kernel"):
        made.load_weights(SAME)
    assert "routed_scaling_factor (2.5)" in caplog.text and "physical_to_logical_map_cpu" in caplog.text
    assert "--kt-max-deferred-experts-per-token changes nothing" in caplog.text
    assert not list(beside.known_faults(OWN, 1.0, masks=True))
