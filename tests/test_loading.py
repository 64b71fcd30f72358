"""Loading a whole model: in chunks, from the checkpoint or from the packed cache, the same model comes out."""

from __future__ import annotations

import os
import re
import shutil
import threading
from pathlib import Path

import pytest
import torch

from tandem import LLM, SamplingParams
from tandem.experts import CpuExperts, cpu_experts
from tandem.kernels.cpu import PackedExperts, PackedMatrix, WorkerPool, Workspace

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1)
VARIANTS = ["qwen2_moe", "glm4_moe", "olmoe-clip", "qwen3_moe-tied"]


def answer(model: Path, **flags: object) -> tuple[list[int], object]:
    """Tokens and log-probabilities, bit for bit."""
    llm = LLM(str(model), max_total_tokens=256, kernel_tier="avx2", kt_cpuinfer=2, **flags)
    [result] = llm.generate([[5, 9, 250, 17]], GREEDY)
    return result.token_ids, result.logprobs


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("method", ["BF16", "INT4"])
def test_the_second_start_answers_the_same_and_packs_nothing(
    tiny_models, tmp_path: Path, monkeypatch, capsys, variant: str, method: str
) -> None:
    model, flags = tiny_models[variant], {"packed_cache": str(tmp_path), "kt_method": method}
    plain = answer(model, kt_method=method)
    assert answer(model, **flags) == plain
    assert "written to" in capsys.readouterr().err
    [file] = tmp_path.iterdir()
    assert file.name.startswith(model.name)

    def packing(*_: object, **__: object) -> None:
        raise AssertionError("something was packed")

    monkeypatch.setattr(PackedMatrix, "__init__", packing)
    monkeypatch.setattr(PackedExperts, "load_all", packing)
    assert answer(model, **flags) == plain
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("variant", ["qwen2_moe", "glm4_moe"])
def test_a_model_divided_among_memory_nodes_answers_the_same(
    tiny_models, tmp_path: Path, capsys, variant: str
) -> None:
    model, flags = tiny_models[variant], {"packed_cache": str(tmp_path)}
    whole = answer(model, **flags)
    capsys.readouterr()
    assert answer(model, kt_threadpool_count=2, **flags) == whole
    assert "the model is packed again" in capsys.readouterr().err  # bytes lie in another order
    assert answer(model, kt_threadpool_count=2, **flags) == whole
    assert capsys.readouterr().err == ""


def test_a_cache_of_an_older_checkpoint_is_named_and_replaced(tiny_models, tmp_path: Path, capsys) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_models["olmoe"], model)
    flags = {"packed_cache": str(tmp_path / "cache")}
    before = answer(model, **flags)
    other = tiny_models["olmoe-clip"]
    for file in model.glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-4000:] = bytes(4000)  # other weights, the same sizes
        file.write_bytes(data)
        os.utime(file, ns=(1, 1))
    capsys.readouterr()
    after = answer(model, **flags)
    assert after == answer(model) != before
    said = capsys.readouterr().err
    assert re.search(
        r"note: packed cache: .*\.packed was made from .*, not from .*; the model is packed again", said
    )
    assert "written to" in said
    assert answer(other) != before


def test_a_damaged_cache_is_never_used(tiny_models, tmp_path: Path, capsys) -> None:
    model, flags = tiny_models["qwen3_moe"], {"packed_cache": str(tmp_path)}
    right = answer(model, **flags)
    [file] = tmp_path.iterdir()
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)
    assert answer(model, **flags) == right
    assert f"note: packed cache: {file} is damaged at byte" in capsys.readouterr().err


def test_experts_are_asked_for_in_chunks_by_another_thread(monkeypatch) -> None:
    monkeypatch.setattr(cpu_experts, "CHUNK_BYTES", 3 * 3 * 40 * 96 * 4)  # three experts
    workspace = Workspace(WorkerPool([-1, -1]), "scalar")
    weights = [tuple(torch.randn(*shape) for shape in ((40, 96), (40, 96), (96, 40))) for _ in range(8)]
    asked: list[int] = []

    def matrices(expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert threading.current_thread() is not threading.main_thread()
        asked.append(expert)
        return weights[expert]

    whole, apart = (PackedExperts(workspace, 8, 96, 40, "f32") for _ in range(2))
    CpuExperts(whole).load(8, matrices)
    for expert, matrices_of in enumerate(weights):
        apart.load(expert, *matrices_of)
    assert asked == list(range(8))
    assert [bytes(part) for part in whole.parts()] == [bytes(part) for part in apart.parts()]


def test_an_error_of_one_expert_is_the_error_of_loading() -> None:
    layer = CpuExperts(PackedExperts(Workspace(WorkerPool([-1]), "scalar"), 4, 32, 16, "f32"))

    def matrices(expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if expert == 2:
            raise ValueError("expert 2 cannot be read")
        return torch.zeros(16, 32), torch.zeros(16, 32), torch.zeros(32, 16)

    with pytest.raises(ValueError, match="expert 2"):
        layer.load(4, matrices)
