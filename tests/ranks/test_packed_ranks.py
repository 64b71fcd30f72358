"""Packed caches of ranks: each keeps its part in a file of its own, and the next start packs nothing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from fake_model import request, run, token_ids
from kernel_cases import INVARIANT_TIER
from ranked_engine import ranked_engine
from tandem.engine.engine import Engine
from tandem.engine.start import packed_start
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.cpu import PackedExperts, PackedMatrix
from tandem.machine.machine import Machine

pytestmark = pytest.mark.skipif(len(Machine.detect_cpus().cores) < 2, reason="a rank needs a core")

FLAGS = {"device": "cpu", "dtype": "float32", "kt_cpuinfer": 2, "kernel_tier": INVARIANT_TIER,
         "max_total_tokens": 256}  # fmt: skip
RANKS = ("rank0of2", "rank1of2")


def answer(engine: Engine) -> list[int]:
    return token_ids(run(engine, request("a", [5, 9, 250, 17], max_tokens=8, ignore_eos=True))["a", 0])


def of_ranks(path: Path, cache: Path, folder: Path) -> list[int]:
    config = EngineConfig.from_keywords(str(path), tp=2, packed_cache=str(cache), **FLAGS)
    with ranked_engine(config, folder) as (engine, (other,)):
        tokens = answer(engine)
    assert not other.failed
    return tokens


def alone(path: Path, cache: Path | None) -> list[int]:
    config = EngineConfig.from_keywords(str(path), packed_cache=None if cache is None else str(cache), **FLAGS)
    return answer(Engine(config))


def file_of(cache: Path, name: str) -> Path:
    [file] = [each for each in cache.iterdir() if name in each.name]
    return file


def nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    def packing(*_: object, **__: object) -> None:
        raise AssertionError("something was packed")

    monkeypatch.setattr(PackedMatrix, "__init__", packing)
    monkeypatch.setattr(PackedExperts, "load_all", packing)


@pytest.mark.parametrize("variant", ["qwen3_moe", "gpt_oss", "glm4_moe"])
def test_a_second_start_packs_nothing(tiny_models, tmp_path, monkeypatch, capsys, variant) -> None:
    """Beside one process's file, too, which is another one's: each is verified while the start goes on."""
    path, cache = tiny_models[variant], tmp_path / "cache"
    expected = alone(path, cache)
    assert of_ranks(path, cache, tmp_path) == expected
    assert capsys.readouterr().err.count("written to") == 3
    begun, verify = list[str](), packed_start.early_verification

    def noted(*arguments):
        verification = verify(*arguments)
        begun.append(verification.file.path.name)
        return verification

    nothing_is_packed(monkeypatch)
    monkeypatch.setattr(packed_start, "early_verification", noted)
    assert of_ranks(path, cache, tmp_path) == alone(path, cache) == expected
    assert capsys.readouterr().err == ""
    assert all(any(rank in name for name in begun) for rank in RANKS)
    assert len(set(begun)) == len(begun) == len(list(cache.iterdir())) == 3


@pytest.mark.parametrize("rank", RANKS)
def test_a_damaged_file_is_one_ranks_alone(tiny_models, tmp_path, capsys, rank) -> None:
    """That rank packs its part again; the other one takes its own from the file."""
    path, cache = tiny_models["qwen3_moe"], tmp_path / "cache"
    expected = of_ranks(path, cache, tmp_path)
    capsys.readouterr()
    file = file_of(cache, rank)
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)
    assert of_ranks(path, cache, tmp_path) == expected
    said = capsys.readouterr().err
    assert said.count("the model is packed again") == said.count("written to") == 1 and rank in said
    assert of_ranks(path, cache, tmp_path) == expected
    assert capsys.readouterr().err == ""


def test_files_of_a_changed_checkpoint_are_replaced(tiny_models, tmp_path, capsys) -> None:
    """So a cache does not grow with every version of a model."""
    path, cache = tmp_path / "model", tmp_path / "cache"
    shutil.copytree(tiny_models["qwen3_moe"], path)
    for seconds in (1, 2):
        os.utime(path / "model.safetensors", (seconds, seconds))
        of_ranks(path, cache, tmp_path)
    said = capsys.readouterr().err
    assert said.count("the model is packed again") == 2 and said.count("written to") == 4
    assert len(list(cache.iterdir())) == 2
