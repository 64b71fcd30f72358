"""Servers that start at the same time on one machine: each takes GPUs that no other is about to fill."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_questions import question
from tandem.engine.start.gpu_claims import left_bytes, undisputed_plan
from tandem.errors import DoesNotFit
from tandem.flags import env
from tandem.machine.gpu_locks import GpuLocks, gpu_locks
from tandem.machine.gpus import GpuHolder, is_free
from tandem.machine.machine import Machine
from tandem.planner.forecast.advice import PlanQuestion
from tandem.planner.ways import choose_way

AIR, SMALL = "glm-4.5-air-fp8", "qwen3-30b-a3b"


@pytest.fixture(autouse=True)
def no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[GpuLocks]:
    """Another server of the same user."""
    locks = GpuLocks(tmp_path / "locks", "another-model")
    yield locks
    locks.release()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[GpuLocks]:
    locks = GpuLocks(tmp_path / "locks", "a-model")
    yield locks
    locks.release()


def asked(name: str, gpus: str, **flags: object) -> PlanQuestion:
    """With UUIDs, as a driver gives them."""
    plain = question(name, gpus, **flags)
    named = tuple(replace(gpu, uuid=f"GPU-{gpu.number}") for gpu in plain.machine.gpus)
    return replace(plain, machine=replace(plain.machine, gpus=named))


def planned(of: PlanQuestion, locks: GpuLocks | None):
    """The choice, the plan and the machine as a start of this process would have them."""

    def of_machine(machine: Machine):
        choice = choose_way(of.config, of.model, machine, of.stored)
        return choice, choice.told(replace(of, config=choice.config, machine=machine).plan())

    return undisputed_plan(of.config, of.machine, locks, of_machine)


def used(plan) -> tuple[str, ...]:
    gpu = plan.gpu
    return () if gpu is None else gpu.rank_uuids or tuple(each.uuid for each in gpu.stages) or (gpu.uuid,)


def test_a_lock_is_had_once_and_says_whose_it_is(own: GpuLocks, other: GpuLocks, tmp_path: Path) -> None:
    assert other.take({"GPU-0": 7, "GPU-1": 8}) == {}
    holder = GpuHolder(os.getpid(), "another-model", 7)
    assert own.take({"GPU-0": 1, "GPU-2": 2}) == {"GPU-0": holder}
    assert holder.text == f"process {os.getpid()}, which loads another-model"
    assert other.take({"GPU-1": 9}) == {}  # GPU 0 is given back
    assert own.take({"GPU-0": 1, "GPU-1": 2}) == {"GPU-1": replace(holder, left_bytes=9)}
    other.release()
    assert own.take({"GPU-0": 1, "GPU-1": 2}) == {}
    assert other.take({"GPU-2": 0}) == {}  # which is not among the last ones
    assert {path.name for path in (tmp_path / "locks").iterdir()} == {f"GPU-{number}.lock" for number in range(3)}
    assert (tmp_path / "locks").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"pid": "x", "model": "m", "left_bytes": 1}'])
def test_a_holder_that_has_not_said_who_it_is(own: GpuLocks, other: GpuLocks, tmp_path: Path, text: str) -> None:
    other.take({"GPU-0": 7})
    (tmp_path / "locks" / "GPU-0.lock").write_text(text)
    assert own.take({"GPU-0": 1}) == {"GPU-0": GpuHolder()}
    assert GpuHolder().text == "another server that starts" and GpuHolder().left_bytes == 0


def test_locks_that_cannot_be_written_stop_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    assert GpuLocks(tmp_path / "file", "m").take({"GPU-0": 1}) == {}
    assert GpuLocks(tmp_path / "file" / "below", "m").take({"GPU-0": 1}) == {}
    assert GpuLocks(tmp_path / "link", "m").take({"GPU-0": 1}) == {}  # which another user may have put there
    assert not list(tmp_path.glob("*.lock"))
    monkeypatch.setattr(os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
    assert GpuLocks(tmp_path, "m").take({"GPU-0": 1}) == {} and not list(tmp_path.glob("*.lock"))
    monkeypatch.undo()

    def no_locks(file: int, kind: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    locks = GpuLocks(tmp_path / "locks", "m")
    assert locks.take({"GPU-0": 1, "../GPU 1": 1}) == {}
    assert {path.name for path in (tmp_path / "locks").iterdir()} == {"GPU-0.lock", "___GPU_1.lock"}
    locks.release()


def test_locks_end_with_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(DoesNotFit), gpu_locks("m") as locks:
        locks.take({"GPU-0": 1})
        assert GpuLocks(env.lock_dir(), "n").take({"GPU-0": 1})
        raise DoesNotFit("too large")
    after = GpuLocks(env.lock_dir(), "n")
    assert after.take({"GPU-0": 1}) == {} and env.lock_dir() == tmp_path / f"tandem-{os.getuid()}"
    after.release()


def test_what_a_plan_leaves_of_each_gpu() -> None:
    for name, gpus, flags in ((AIR, "2xh200", {}), (AIR, "2xh200", {"tp": 2}), (SMALL, "24GB,12GB", {"pp": 2})):
        of = asked(name, gpus, **flags)
        plan = of.plan()
        left = left_bytes(plan, of.machine)
        assert tuple(left) == used(plan)
        (ledger,) = [each for each in plan.ledgers if each.place == "VRAM"]
        free = sum(gpu.free_bytes for gpu in of.machine.gpus if gpu.uuid in left)
        taken = ledger.total_bytes * (plan.ranks if plan.ranks > 1 else 1)
        assert 0 <= free - sum(left.values()) - taken + len(left) <= 2 * len(left)
    assert left_bytes(replace(plan, gpu=None), of.machine) == {}
    unnamed = replace(of.machine, gpus=tuple(replace(gpu, uuid="") for gpu in of.machine.gpus))
    assert left_bytes(plan, unnamed) == {}


@pytest.mark.parametrize(
    ("name", "gpus", "flags", "first", "second"),
    [
        (SMALL, "2xh200", {}, ("GPU-0",), ("GPU-1",)),
        (SMALL, "2xh200", {"tp": 1}, ("GPU-0",), ("GPU-1",)),
        (AIR, "2xh200", {}, ("GPU-0", "GPU-1"), None),
        (AIR, "4xh200", {"tp": 2}, ("GPU-0", "GPU-1"), ("GPU-2", "GPU-3")),
        (AIR, "3xh200", {"tp": 2}, ("GPU-0", "GPU-1"), None),  # one is left: the least taken two
        (SMALL, "3x12GB", {"pp": 2}, ("GPU-0", "GPU-1"), None),
    ],
)
def test_the_second_takes_what_is_left(own, other, name, gpus, flags, first, second, caplog) -> None:
    """As far as there are enough GPUs; and it says whose the others are."""
    of = asked(name, gpus, **flags)
    assert used(planned(of, other)[1]) == first
    _, plan, machine = planned(of, own)
    assert second is None or used(plan) == second
    assert {gpu.uuid for gpu in machine.gpus if gpu.holder} == set(first)
    said = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert f"is about to be filled by process {os.getpid()}, which loads another-model: " in said[0]
    assert used(planned(of, None)[1]) == first  # whoever does not ask


def test_what_others_are_about_to_take_counts_as_taken(own: GpuLocks, other: GpuLocks) -> None:
    """As after their start, without flags; where a flag or the variable says which GPUs, as without them."""
    of = asked(AIR, "h200")
    plan = planned(of, other)[1]
    left = left_bytes(plan, of.machine)["GPU-0"]
    _, second, machine = planned(of, own)
    assert [gpu.free_bytes for gpu in machine.gpus] == [left] and not is_free(machine.gpus[0])
    after = replace(of, machine=replace(of.machine, gpus=machine.gpus)).plan()
    assert (second.gpu, second.num_pages, second.decisions) == (after.gpu, after.num_pages, after.decisions)


@pytest.mark.parametrize("how", ["--tp 1", "--tp 2", "CUDA_VISIBLE_DEVICES"])
def test_what_was_asked_for_is_warned_of_not_refused(own, other, monkeypatch, caplog, how) -> None:
    gpus = "2xh200" if how == "--tp 2" else "h200"
    of = asked(AIR, gpus, **{"--tp 1": {"tp": 1}, "--tp 2": {"tp": 2}}.get(how, {}))
    if how == "CUDA_VISIBLE_DEVICES":
        monkeypatch.setenv(how, "0")
    first, second = planned(of, other)[1], planned(of, own)[1]
    assert second.gpu == first.gpu and second.num_pages == first.num_pages
    said = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert said[-1].endswith("it is used all the same, as asked, and may be too small for both")


def test_the_order_of_the_variable_stays(own: GpuLocks, other: GpuLocks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    of = asked(SMALL, "2xh200", tp=1)
    of = replace(of, machine=replace(of.machine, gpus=of.machine.gpus[::-1]))
    assert used(planned(of, other)[1]) == used(planned(of, own)[1]) == ("GPU-1",)


def test_a_cpu_needs_no_locks(tmp_path: Path) -> None:
    locks = GpuLocks(tmp_path / "locks", "m")
    planned(asked(SMALL, "h200", device="cpu"), locks)
    assert not (tmp_path / "locks").exists()


STARTS = """
import json, sys
from dataclasses import replace
from pathlib import Path
from tandem.engine.start import loader
from tandem.flags.engine_config import EngineConfig
from tandem.machine.gpu_locks import gpu_locks
from tandem.machine.gpus import Gpu
from tandem.machine.machine import Machine
gpus = tuple(Gpu("NVIDIA H200", 141 << 30, 139 << 30, "gen5 x16", n, f"GPU-{n}", (9, 0)) for n in range(2))
here = replace(Machine.detect_cpus(), gpus=gpus, gpu_missing=())
loader.may_have_gpus, loader.these_cpus = (lambda: True), (lambda: here)
Machine.with_gpus = lambda machine: machine
print("ready", flush=True)
for line in sys.stdin:
    with gpu_locks(sys.argv[1]) as locks:
        way = loader.chosen_way(EngineConfig(model=sys.argv[1]), (), locks)
        print(json.dumps([way.plan.gpu.uuid, way.choice.decision.value]), flush=True)
        sys.stdin.readline()
"""


class Starting:
    """A process that chooses its GPUs as `kt serve` does, on a machine with two, and then loads for ever."""

    def __init__(self, model: Path, folder: Path) -> None:
        variables = {**os.environ, "TMPDIR": str(folder)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", STARTS, str(model)], env=variables, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def end(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate()


def test_servers_that_start_at_once_take_different_gpus(tiny_models, tmp_path: Path) -> None:
    """Two at the same moment; and a third takes the GPU of one that was killed in its start."""
    servers = [Starting(tiny_models["glm4_moe"], tmp_path) for _ in range(3)]
    try:
        assert [server.line() for server in servers] == ["ready"] * 3
        for server in servers[:2]:
            server.go()
        taken = [json.loads(server.line()) for server in servers[:2]]
        assert len({uuid for uuid, _ in taken}) == 2 and {value for _, value in taken} == {"one GPU"}
        servers[0].end()
        servers[2].go()
        assert json.loads(servers[2].line())[0] == taken[0][0]
    finally:
        for server in servers:
            server.end()
