"""Which GPUs there are and which one is taken: nvidia-smi's lines, CUDA_VISIBLE_DEVICES, and what PyTorch calls it."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from plans import gpu_plan
from tandem.engine.start import gpu_device
from tandem.engine.start.gpu_device import grow_segments, planned_device
from tandem.errors import ConfigError
from tandem.machine.gpus import Gpu, detect_gpus, parse_nvidia_smi, usable_gpus
from tandem.machine.machine import Machine
from tandem.server.engine_errors import start_failed

GIB = 1 << 30
ANSWER = """\
0, GPU-aa10, NVIDIA GeForce RTX 3060, 12288, 11500, 4, 16, 8.6
1, GPU-ab20, NVIDIA GeForce RTX 4090, 24564, 20000, 4, 16, 8.9
broken line
2, GPU-cc30, X, [N/A], 1, 2, 3, 9.0
3, GPU-dd40, NVIDIA GeForce GT 1030, 2048, 1900, 3, 4, [N/A]
"""


def smaller(number: int, free: int, uuid: str = "") -> Gpu:
    return Gpu("G", 24 * GIB, free, "gen4 x16", number, uuid)


def test_nvidia_smi_lines() -> None:
    first, second, last = parse_nvidia_smi(ANSWER)
    assert first == Gpu(
        "NVIDIA GeForce RTX 3060", 12288 << 20, 11500 << 20, "gen4 x16", 0, "GPU-aa10", (8, 6)
    )
    assert (second.number, second.capability) == (1, (8, 9))
    assert (last.number, last.capability) == (3, None)


def test_the_emptiest_gpu_comes_first_unless_somebody_chose() -> None:
    gpus = [smaller(0, 20 * GIB), smaller(1, 23 * GIB + 5), smaller(2, 23 * GIB + 9)]
    assert [gpu.number for gpu in usable_gpus(gpus, None)] == [1, 2, 0]  # alike to the GiB: in order
    assert [gpu.number for gpu in usable_gpus(gpus, "0,2")] == [0, 2]


@pytest.mark.parametrize(
    ("chosen", "numbers"),
    [
        ("1", [1]),
        ("3,0", [3, 0]),
        (" 1 , 0 ", [1, 0]),
        ("GPU-ab20", [1]),
        ("GPU-aa,GPU-d", [0, 3]),
        ("GPU-a", []),  # the beginning of two
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,7,1", [0]),  # as CUDA does: nothing after one that there is not
        ("2,1", []),
        ("MIG-GPU-aa10/1/0", []),
        ("1,1,0", [1, 0]),
    ],
)
def test_cuda_visible_devices(chosen: str, numbers: list[int]) -> None:
    assert [gpu.number for gpu in usable_gpus(parse_nvidia_smi(ANSWER), chosen)] == numbers


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of that name, first in the path."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{ANSWER}END\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_detection(nvidia_smi: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [gpu.number for gpu in detect_gpus()[0]] == [1, 0, 3]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert [gpu.number for gpu in Machine.detect().gpus] == [0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert detect_gpus() == ((), "CUDA_VISIBLE_DEVICES= hides every GPU that nvidia-smi shows")
    assert Machine.detect().no_gpu.startswith("CUDA_VISIBLE_DEVICES=")


def test_no_answer_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert detect_gpus() == ((), "no GPU was found")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert detect_gpus() == ((), "no GPU was found")


PLAN = gpu_plan(name="RTX 4090", uuid="GPU-ab20")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """PyTorch sees the 4090 as 1 of two; which device was made the current one, and
    -1 - that whose segments grow."""
    made_current: list[int] = []
    monkeypatch.setattr(gpu_device, "grow_segments", lambda device: made_current.append(-1 - device.index))
    properties = [SimpleNamespace(uuid="aa10"), SimpleNamespace(uuid="AB20")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(properties))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    monkeypatch.setattr(torch.cuda, "set_device", made_current.append)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "")  # put back afterwards
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    return made_current


def test_the_planned_gpu_is_found_by_its_uuid(cuda: list[int]) -> None:
    assert planned_device(PLAN) == torch.device("cuda", 1)
    assert cuda == [1, -2] and os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert planned_device(replace(PLAN, uuid="")) == torch.device("cuda", 0)


def test_an_order_that_was_asked_for_is_kept(cuda: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    planned_device(PLAN)
    assert os.environ["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Settings that PyTorch's allocator was given."""
    settings: list[str] = []
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    return settings


def test_segments_of_gpu_memory_grow(allocator: list[str]) -> None:
    grow_segments(torch.device("cpu"))
    assert allocator == ["expandable_segments:True"]


def test_segments_that_a_driver_cannot_grow(allocator: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*shape: int, device: torch.device) -> torch.Tensor:
        raise RuntimeError("CUDA driver error: operation not supported")

    monkeypatch.setattr(torch, "empty", refuses)
    grow_segments(torch.device("cuda", 0))
    assert allocator == ["expandable_segments:True", "expandable_segments:False"]


@pytest.mark.parametrize(("wished", "settings"), [
    ("max_split_size_mb:512", ["max_split_size_mb:512,expandable_segments:True"]),
    ("expandable_segments:False", []), ("backend:cudaMallocAsync", []),
])  # fmt: skip
def test_what_the_user_set_of_the_allocator_stays(
    wished: str, settings: list[str], allocator: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", wished)
    grow_segments(torch.device("cpu"))
    assert allocator == settings


def test_a_gpu_that_pytorch_does_not_see(cuda: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="PyTorch does not see RTX 4090 .*CUDA_VISIBLE_DEVICES=GPU-cc") as unseen:
        planned_device(replace(PLAN, uuid="GPU-cc"))
    assert start_failed(unseen.value).of_gpus  # another choice of GPUs may start
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="PyTorch cannot use RTX 4090: check its driver"):
        planned_device(PLAN)
    assert cuda == []


def test_gpus_in_mig_mode_are_known_to_be_divided() -> None:
    """Drivers that do not know of it say nothing."""
    line = "0, GPU-aa10, NVIDIA A100, 81920, 80000, 4, 16, 8.0"
    modes = {"": False, ", Enabled": True, ", Disabled": False, ", [N/A]": False}
    assert [parse_nvidia_smi(line + mode)[0].divided for mode in modes] == list(modes.values())
