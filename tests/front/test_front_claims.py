"""Answers to a front that asks if a model fits, while other servers start: what they are about to take is not free."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.flags import env
from tandem.kernels.this_machine import these_cpus
from tandem.machine.gpus import Gpu
from tandem.machine.memory_claims import MemoryClaims
from tandem.server.front import fits

GIB, MIB = 1 << 30, 1 << 20
LOADED = 7  # the process of a model that the front has loaded
CLAIMS = """
import sys
from tandem.flags import env
from tandem.machine.memory_claims import memory_claims
env.TMP = sys.argv[1]
with memory_claims("another-model") as claims:
    claims.take({"GPU-0": 100 << 20}, None)
    print("taken", flush=True)
    sys.stdin.readline()
"""


class Front:
    """Asks about a tiny model on a machine with one GPU of 8 GiB. free, held: bytes of the GPU that are free, and that
    the loaded model has; told: whether the driver says whose those are."""

    def __init__(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model, self.free, self.held, self.told = model, 8 * GIB, 0, True
        self.ram, self.limited = 16 * GIB, False
        monkeypatch.setattr(fits, "this_machine", self._machine)
        monkeypatch.setattr(fits, "family_of", set)
        monkeypatch.setattr(fits, "own_bytes", lambda pid: 4 * GIB)
        monkeypatch.setattr(fits, "gpu_bytes", lambda pids: {"GPU-0": self.held} if pids and self.told else {})

    def _machine(self):
        gpu = Gpu("NVIDIA L4", 8 * GIB, self.free, "gen4 x16", 0, "GPU-0", (8, 9))
        return dataclasses.replace(
            these_cpus(), gpus=(gpu,), gpu_missing=(), total_memory=32 * GIB, available_memory=self.ram,
            limited_memory=self.limited,
        )  # fmt: skip

    def verdict(self, *flags: str, loaded: tuple[int, ...] = ()) -> tuple[str, bool]:
        return fits.verdict(["--model", str(self.model), "--max-total-tokens", "512", *flags], loaded)


@pytest.fixture
def front(tiny_models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Front:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(env, "TMP", str(tmp_path))
    return Front(tiny_models["glm4_moe"], monkeypatch)


@pytest.fixture
def other(front: Front) -> Iterator[MemoryClaims]:
    """Another server of the same user, which starts."""
    with contextlib.closing(contextlib.ExitStack()) as stack:
        claims = MemoryClaims(env.lock_dir(), "another-model")
        stack.callback(claims.release)
        yield claims


def test_a_gpu_that_another_server_is_about_to_fill_is_full(front: Front, other: MemoryClaims) -> None:
    assert front.verdict("--device", "cuda") == ("", True)
    other.take({"GPU-0": 100 * MIB}, None)
    why, possible = front.verdict("--device", "cuda")
    assert "too small" in why and not possible
    assert front.verdict() == ("", True)  # without the GPU, as its start would
    other.take({"GPU-0": 5 * GIB}, None)
    assert front.verdict("--device", "cuda") == ("", True)
    other.take({"GPU-0": 100 * MIB}, None)
    other.release()
    assert front.verdict("--device", "cuda") == ("", True)


def test_memory_that_another_server_is_about_to_fill_is_full(front: Front, other: MemoryClaims) -> None:
    in_ram = ("--device", "cuda", "--kt-gpu-experts-ratio", "0")
    other.take({}, 0)
    why, possible = front.verdict(*in_ram)
    assert "0 MiB may be used" in why and not possible
    assert front.verdict(*in_ram, loaded=(LOADED,)) == (why, True)  # in what the loaded model gives back
    front.limited = True  # another group may have another limit
    assert front.verdict(*in_ram) == ("", True)


@pytest.mark.parametrize("told", [True, False])
def test_a_loaded_model_goes_where_another_server_takes_the_rest(front: Front, other, told: bool) -> None:
    """Claims count with what the loaded model holds: what it gives back is left to the new one."""
    front.free, front.held, front.told = 4 * GIB, 4 * GIB, told
    assert front.verdict(loaded=(LOADED,)) == ("", True)
    other.take({"GPU-0": 100 * MIB}, None)
    assert front.verdict(loaded=(LOADED,)) == ("the GPU is taken by other models", True)
    why, possible = front.verdict("--device", "cuda", loaded=(LOADED,))
    assert "too small" in why and possible
    front.held = 0
    assert front.verdict("--device", "cuda", loaded=(LOADED,))[1] is not told


def test_what_a_loaded_model_was_about_to_take_goes_with_it(front: Front, other, monkeypatch) -> None:
    """As of one whose engine starts again. Its claim is this process's here."""
    other.take({"GPU-0": 100 * MIB}, None)
    assert front.verdict("--device", "cuda", loaded=(LOADED,))[1] is False
    monkeypatch.setattr(fits, "family_of", lambda roots: {*roots, os.getpid()})
    why, possible = front.verdict("--device", "cuda", loaded=(LOADED,))
    assert "too small" in why and possible


def test_what_a_start_is_not_refused_for_the_front_does_not_refuse(front: Front, other, monkeypatch) -> None:
    other.take({"GPU-0": 100 * MIB}, None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert front.verdict("--device", "cuda") == ("", True)


def test_a_cpu_needs_no_claims_of_others(front: Front, tmp_path: Path) -> None:
    assert front.verdict("--device", "cpu") == ("", True)
    assert not env.lock_dir().exists()


def test_a_process_that_starts_is_seen_until_it_ends(front: Front, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", CLAIMS, str(tmp_path)], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "taken\n"
        assert "too small" in front.verdict("--device", "cuda")[0]
    finally:
        process.kill()
        process.communicate()
    assert front.verdict("--device", "cuda") == ("", True)
