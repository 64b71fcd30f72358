"""Servers that start at the same time on one machine: each plans with memory that no other is about to fill."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_questions import question
from tandem.engine.start.gpu_claims import left_bytes, undisputed_plan
from tandem.errors import DoesNotFit
from tandem.flags import env
from tandem.flags.ways import with_way_kept
from tandem.machine import memory_claims as memory_claims_module
from tandem.machine.gpus import is_free
from tandem.machine.machine import Machine
from tandem.machine.memory_claims import Claim, MemoryClaims, memory_claims
from tandem.planner.forecast.advice import PlanQuestion
from tandem.planner.ways import choose_way

AIR, SMALL = "glm-4.5-air-fp8", "qwen3-30b-a3b"


@pytest.fixture(autouse=True)
def no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[MemoryClaims]:
    """Another server of the same user."""
    claims = MemoryClaims(tmp_path / "claims", "another-model")
    yield claims
    claims.release()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[MemoryClaims]:
    claims = MemoryClaims(tmp_path / "claims", "a-model")
    yield claims
    claims.release()


def asked(name: str, gpus: str, **flags: object) -> PlanQuestion:
    """With UUIDs, as a driver gives them."""
    plain = question(name, gpus, **flags)
    named = tuple(replace(gpu, uuid=f"GPU-{gpu.number}") for gpu in plain.machine.gpus)
    return replace(plain, machine=replace(plain.machine, gpus=named))


def planned(of: PlanQuestion, claims: MemoryClaims | None, meanwhile: Callable[[], object] = lambda: None):
    """The choice, the plan and the machine as a start of this process would have them. meanwhile: is called while it
    plans."""

    def of_machine(machine: Machine):
        meanwhile()
        choice = choose_way(of.config, of.model, machine, of.stored)
        return choice, choice.told(replace(of, config=choice.config, machine=machine).plan())

    return undisputed_plan(of.config, of.machine, claims, of_machine, lambda: of.machine)


def with_ram(of: PlanQuestion, gib: int) -> PlanQuestion:
    return replace(of, machine=replace(of.machine, available_memory=gib << 30))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]


def ram_bytes(plan) -> int:
    return plan.ranks * sum(each.total_bytes for each in plan.ledgers if each.place == "RAM")


def used(plan) -> tuple[str, ...]:
    gpu = plan.gpu
    return () if gpu is None else gpu.rank_uuids or tuple(each.uuid for each in gpu.stages) or (gpu.uuid,)


def test_a_claim_is_seen_until_it_is_given_back(own: MemoryClaims, other: MemoryClaims, tmp_path: Path) -> None:
    assert own.others() == []
    other.take({"GPU-0": 7, "GPU-1": 8}, 9)
    first = Claim(os.getpid(), "another-model", {"GPU-0": 7, "GPU-1": 8}, 9)
    assert own.others() == [first] and other.others() == []
    own.take({"GPU-0": 5}, None)
    assert other.others() == [Claim(os.getpid(), "a-model", {"GPU-0": 5}, None)]
    other.take({"GPU-2": 3}, 2)
    assert own.others() == [Claim(os.getpid(), "another-model", {"GPU-2": 3}, 2)]
    other.release()
    assert own.others() == [] and len(list((tmp_path / "claims").glob("*.claim"))) == 1
    assert (tmp_path / "claims").stat().st_mode & 0o777 == 0o700


def test_a_claim_is_complete_as_soon_as_others_see_it(own, other, tmp_path: Path, monkeypatch) -> None:
    seen, write = [], os.write

    def observed(file: int, content: bytes) -> int:
        seen.append(own.others())
        count = write(file, content)
        seen.append(own.others())
        return count

    monkeypatch.setattr("os.write", observed)
    other.take({"GPU-0": 7}, 9)
    assert seen == [[], []] and len(own.others()) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"pid": "x", "model": "m", "left_bytes": 1}'])
def test_a_file_of_another_version_stops_nobody(own: MemoryClaims, other: MemoryClaims, tmp_path: Path, text) -> None:
    other.take({"GPU-0": 7}, 9)
    (path,) = (tmp_path / "claims").glob("*.claim")
    path.write_text(text)
    assert own.others() == [] and path.exists()


def test_claims_that_cannot_be_written_stop_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    of = asked(SMALL, "h200")

    def starts(folder: Path) -> None:
        claims = MemoryClaims(folder, "m")
        assert used(planned(of, claims)[1]) == ("GPU-0",) and claims.others() == []
        claims.release()

    starts(tmp_path / "file")
    starts(tmp_path / "file" / "below")
    starts(tmp_path / "link")  # which another user may have put there
    monkeypatch.setattr(os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
    starts(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link"}
    monkeypatch.undo()

    def no_locks(file: int, kind: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    starts(tmp_path / "claims")
    assert {path.name for path in (tmp_path / "claims").iterdir()} == {"turn"}


def test_a_name_that_is_no_text_stops_nobody(own: MemoryClaims, tmp_path: Path) -> None:
    """As Python reads a folder's name that is not in UTF-8."""
    claims = MemoryClaims(tmp_path / "claims", "m\udce9")
    claims.take({"GPU-0": 7}, 9)
    assert [claim.model for claim in own.others()] == ["m\\udce9"]
    claims.release()


def test_a_full_disk_stops_nobody(own: MemoryClaims, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.write", full)
        own.take({"GPU-0": 7}, 9)
    assert list((tmp_path / "claims").iterdir()) == []


def test_claims_end_with_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "TMP", str(tmp_path))
    with pytest.raises(DoesNotFit), memory_claims("m") as claims:
        claims.take({"GPU-0": 1}, 1)
        assert len(MemoryClaims(env.lock_dir(), "n").others()) == 1
        raise DoesNotFit("too large")
    assert MemoryClaims(env.lock_dir(), "n").others() == []


def test_a_variable_does_not_part_a_service_from_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env.tempfile, "tempdir", str(tmp_path / "of-TMPDIR"))
    monkeypatch.setattr(env, "TMP", str(tmp_path))
    assert env.lock_dir() == tmp_path / f"tandem-{os.getuid()}"
    monkeypatch.setattr(env, "TMP", str(tmp_path / "none"))
    assert env.lock_dir() == tmp_path / "of-TMPDIR" / f"tandem-{os.getuid()}"


def test_a_plan_that_stands_still_is_not_waited_for(own, other, monkeypatch, caplog) -> None:
    monkeypatch.setattr(memory_claims_module, "TURN_SECONDS", 0.0)
    with other.turn():
        assert used(planned(asked(SMALL, "h200"), own)[1]) == ("GPU-0",)
    assert warnings(caplog) == ["another server plans for 0 s already: this one does not wait for it"]
    with own.turn():  # is had again
        pass
    assert len(warnings(caplog)) == 1


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
        (AIR, "2xh200", {}, ("GPU-0", "GPU-1"), ("GPU-0",)),  # in what the first leaves there
        (AIR, "4xh200", {"tp": 2}, ("GPU-0", "GPU-1"), ("GPU-2", "GPU-3")),
        (AIR, "3xh200", {"tp": 2}, ("GPU-0", "GPU-1"), ("GPU-0", "GPU-2")),  # one is left, and two are needed
        (SMALL, "3x12GB", {"pp": 2}, ("GPU-0", "GPU-1"), ("GPU-2", "GPU-0")),
    ],
)
def test_the_second_takes_what_is_left(own, other, name, gpus, flags, first, second, caplog) -> None:
    """As far as there are enough GPUs; and it says whose the others are."""
    of = asked(name, gpus, **flags)
    assert used(planned(of, other)[1]) == first
    _, plan, machine = planned(of, own)
    assert used(plan) == second
    assert {gpu.uuid for gpu in machine.gpus if gpu.holder} == set(first)
    whose = f" is about to be filled by process {os.getpid()}, which loads another-model: "
    assert sum(whose in line for line in warnings(caplog)) == len(first)
    assert used(planned(of, None)[1]) == first  # whoever does not ask


def test_what_others_are_about_to_take_counts_as_taken(own: MemoryClaims, other: MemoryClaims) -> None:
    """As after their start, without flags; where a flag or the variable says which GPUs, as without them."""
    of = asked(AIR, "h200")
    plan = planned(of, other)[1]
    left = left_bytes(plan, of.machine)["GPU-0"]
    _, second, machine = planned(of, own)
    assert [gpu.free_bytes for gpu in machine.gpus] == [left] and not is_free(machine.gpus[0])
    ram = of.machine.available_memory - ram_bytes(plan)
    assert machine.available_memory == ram
    after = replace(of, machine=replace(of.machine, gpus=machine.gpus, available_memory=ram)).plan()
    assert (second.gpu, second.num_pages, second.decisions) == (after.gpu, after.num_pages, after.decisions)


@pytest.mark.parametrize("shares", [(0.2, None, None), (0.3, 0.3, None)])
def test_a_third_sees_the_first_two(tmp_path: Path, shares) -> None:
    """On one GPU; also where the first is done before the third starts."""
    free = taken = asked(SMALL, "h200").machine.gpus[0].free_bytes
    everyone = [MemoryClaims(tmp_path, name) for name in "abcd"]
    for share, claims in zip(shares, everyone, strict=False):
        of = asked(SMALL, "h200", **({} if share is None else {"mem_fraction_static": share}))
        _, plan, machine = planned(of, claims)
        assert machine.gpus[0].free_bytes == taken
        taken = left_bytes(plan, machine).get("GPU-0", taken)
    assert 0 < taken < free
    everyone[0].release()
    assert planned(asked(SMALL, "h200"), everyone[3])[2].gpus[0].free_bytes == taken
    for claims in everyone:
        claims.release()


def test_one_that_ends_while_another_plans_is_in_what_is_free_then(own: MemoryClaims, other: MemoryClaims) -> None:
    """It claims, loads and ends after this one has looked at the driver, and before it plans."""
    of = asked(SMALL, "h200")
    other.take({}, None)  # the folder is not new
    own = MemoryClaims(own._folder, "a-model")
    left = left_bytes(planned(of, other)[1], of.machine)["GPU-0"]
    other.release()
    now = replace(of.machine, gpus=(replace(of.machine.gpus[0], free_bytes=left),), available_memory=99 << 30)
    machines: list[Machine] = []

    def of_machine(machine: Machine):
        machines.append(machine)
        choice = choose_way(of.config, of.model, machine, of.stored)
        return choice, choice.told(replace(of, config=choice.config, machine=machine).plan())

    undisputed_plan(of.config, of.machine, own, of_machine, lambda: now)
    assert [(each.gpus[0].free_bytes, each.available_memory) for each in machines] == [(left, 99 << 30)]
    undisputed_plan(of.config, of.machine, own, of_machine, lambda: replace(now, gpus=()))  # no answer
    assert machines[1] == of.machine
    own.release()
    undisputed_plan(of.config, of.machine, MemoryClaims(own._folder, "m"), of_machine, list)  # is not asked again
    assert machines[2] == of.machine


@pytest.mark.parametrize("name, gpus, ram", [(AIR, "2xh100", 32), (SMALL, "2x24GB", 32), (AIR, "2xa100", 8)])
def test_of_two_that_need_both_gpus_one_gets_them(own, other, name, gpus, ram) -> None:
    of, seconds = with_ram(asked(name, gpus), ram), []

    def second() -> None:
        try:
            planned(of, own)
        except DoesNotFit as error:
            seconds.append(error)

    thread = threading.Thread(target=second)
    assert used(planned(of, other, thread.start)[1]) == ("GPU-0", "GPU-1")
    thread.join()
    assert len(seconds) == 1
    other.release()
    assert used(planned(of, own)[1]) == ("GPU-0", "GPU-1")


@pytest.mark.parametrize(
    ("name", "gpus", "ram", "flags", "fits"),
    [
        (SMALL, "2x12GB", 128, {}, True),
        (SMALL, "2x12GB", 64, {}, False),
        (AIR, "2x24GB", 256, {"tp": 1}, True),
        (AIR, "2x24GB", 128, {"tp": 1}, False),
        (AIR, "2xh100", 128, {"tp": 1}, True),
        (AIR, "2xh100", 64, {"tp": 1}, False),
    ],
)
def test_ram_of_both_is_no_more_than_there_is(own, other, caplog, name, gpus, ram, flags, fits) -> None:
    """A second model that has no room beside the first is refused, as it will be once that is loaded."""
    of, left = with_ram(asked(name, gpus, **flags), ram), []
    first = planned(of, other)[1]

    def second(machine: Machine):
        left.append(machine.available_memory)
        choice = choose_way(of.config, of.model, machine, of.stored)
        return choice, choice.told(replace(of, config=choice.config, machine=machine).plan())

    with contextlib.nullcontext() if fits else pytest.raises(DoesNotFit):
        plan = undisputed_plan(of.config, of.machine, own, second, lambda: of.machine)[1]
        assert ram_bytes(first) + ram_bytes(plan) <= ram << 30
    assert left == [(ram << 30) - ram_bytes(first)]
    whose = f"process {os.getpid()}, which loads another-model: they are left to it"
    assert any(line.endswith(f" of free CPU memory are about to be filled by {whose}") for line in warnings(caplog))


def test_ram_counts_where_the_gpu_is_named(own, other, monkeypatch) -> None:
    """A server for each GPU, of those that are started at once."""
    of = with_ram(asked(SMALL, "2x12GB"), 128)
    one, two = (replace(of, machine=replace(of.machine, gpus=(gpu,))) for gpu in of.machine.gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    first = planned(one, other)[1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    _, second, machine = planned(two, own)
    assert machine.available_memory == (128 << 30) - ram_bytes(first) and used(second) == ("GPU-1",)


def test_ram_that_a_control_group_limits_is_not_told(own: MemoryClaims, other: MemoryClaims) -> None:
    """Another group may have another limit: it would be left little for nothing."""
    of = with_ram(asked(SMALL, "2x12GB"), 64)
    limited = replace(of, machine=replace(of.machine, limited_memory=True))
    planned(limited, other)
    assert planned(of, own)[2].available_memory == 64 << 30
    other.release()
    assert planned(limited, other)[2].available_memory == 64 << 30


@pytest.mark.parametrize("how", ["--tp 2", "CUDA_VISIBLE_DEVICES"])
def test_what_was_asked_for_is_warned_of_not_refused(own, other, monkeypatch, caplog, how) -> None:
    of = asked(AIR, "2xh200", tp=2) if how == "--tp 2" else asked(AIR, "h200")
    if how == "CUDA_VISIBLE_DEVICES":
        monkeypatch.setenv(how, "0")
    first, second = planned(of, other)[1], planned(of, own)[1]
    assert second.gpu == first.gpu and second.num_pages == first.num_pages
    assert warnings(caplog)[-1].endswith("it is used all the same, as asked, and may be too small for both")


@pytest.mark.parametrize("ranks, stages", [(1, 1), (2, 1), (1, 2)])
def test_a_way_that_was_kept_is_no_flag(own, other, caplog, ranks: int, stages: int) -> None:
    """As of an engine that starts again: it plans with what others leave."""
    of = asked(SMALL, "2xh200")
    of = replace(of, config=with_way_kept(of.config, ranks, stages))
    other.take({"GPU-0": 50 << 30, "GPU-1": 60 << 30}, None)
    _, plan, machine = planned(of, own)
    assert sorted(gpu.free_bytes >> 30 for gpu in machine.gpus) == [50, 60]
    assert len(used(plan)) == ranks * stages
    assert {line.rpartition(": ")[2] for line in warnings(caplog)} == {"what that takes is left to it"}


def test_the_order_of_the_variable_stays(own: MemoryClaims, other: MemoryClaims, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    of = asked(SMALL, "2xh200", tp=1)
    of = replace(of, machine=replace(of.machine, gpus=of.machine.gpus[::-1]))
    assert used(planned(of, other)[1]) == used(planned(of, own)[1]) == ("GPU-1",)


def test_a_cpu_needs_no_claims(tmp_path: Path) -> None:
    for of in (asked(SMALL, "h200", device="cpu"), asked(SMALL, "h200")):
        of = of if of.config.device == "cpu" else replace(of, machine=replace(of.machine, gpus=()))
        planned(of, MemoryClaims(tmp_path / "claims", "m"))
        assert not (tmp_path / "claims").exists()


STARTS = """
import json, sys
from dataclasses import replace
from pathlib import Path
from tandem.engine.start import loader
from tandem.flags.engine_config import EngineConfig
from tandem.flags import env
from tandem.machine.memory_claims import memory_claims
from tandem.machine.gpus import Gpu
from tandem.machine.machine import Machine
gpus = tuple(Gpu("NVIDIA H200", 141 << 30, 139 << 30, "gen5 x16", n, f"GPU-{n}", (9, 0)) for n in range(2))
here = replace(Machine.detect_cpus(), gpus=gpus, gpu_missing=())
loader.may_have_gpus, loader.these_cpus = (lambda: True), (lambda: here)
Machine.with_gpus = lambda machine: machine
env.TMP = sys.argv[2]
print("ready", flush=True)
for line in sys.stdin:
    with memory_claims(sys.argv[1]) as claims:
        way = loader.chosen_way(EngineConfig(model=sys.argv[1]), (), claims)
        print(json.dumps([way.plan.gpu.uuid, way.choice.decision.value]), flush=True)
        sys.stdin.readline()
"""


class Starting:
    """A process that chooses its GPUs as `kt serve` does, on a machine with two, and then loads for ever."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", STARTS, str(model), str(folder)], text=True,
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
