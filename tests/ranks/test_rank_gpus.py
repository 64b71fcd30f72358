"""Which GPUs ranks are on, and how far these are from each other: what the driver says of links counts, not names."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from gpu_questions import decision, question
from plans import GIB
from tandem.engine.ranks.joined import gpus_of_first
from tandem.engine.start.loader import rank_plan
from tandem.errors import ConfigError
from tandem.kernels.ranks.meeting import Meeting
from tandem.machine import links as machine_links
from tandem.machine import machine as detection
from tandem.machine.gpus import Gpu, kinds_of, most_equal
from tandem.machine.links import GpuLinks, gpu_links
from tandem.machine.machine import Machine
from tandem.planner.forecast.advice import PlanQuestion, ways_to_go_faster
from tandem.planner.forecast.machine_spec import MachineWish, wished_machine
from tandem.planner.forecast.prediction import SUMS
from tandem.planner.forecast.report import report
from tandem.planner.ranks.rank_gpus import rank_gpus
from tandem.planner.ranks.ranked import own_side
from tandem.planner.ways import choose_way

AIR = "glm-4.5-air-fp8"
NUMBERS = range(4)


@pytest.fixture(autouse=True)
def no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def linked(words: dict[tuple[int, int], str], other: str = "SYS", peers: str = "OK") -> GpuLinks:
    """Links between four GPUs. words: of pairs, in either order; other: of all else."""
    ways = {pair: words.get(pair, words.get(pair[::-1], other)) for pair in permutations(NUMBERS, 2)}
    return GpuLinks(ways, dict.fromkeys(ways, peers))


def with_links(asked: PlanQuestion, links: GpuLinks) -> PlanQuestion:
    return replace(asked, machine=replace(asked.machine, links=links))


def way(asked: PlanQuestion) -> str:
    chosen = choose_way(asked.config, asked.model, asked.machine, asked.stored).decision
    return "" if chosen is None else chosen.value


def gpu(number: int, gib: int = 80, name: str = "NVIDIA H100", free: float = 0.98) -> Gpu:
    return Gpu(name, gib * GIB, int(free * gib * GIB), "gen5 x16", number, f"GPU-{number}", (9, 0))


def numbers(gpus: list[Gpu], ranks: int = 2, links: GpuLinks = GpuLinks()) -> list[int]:
    machine = replace(question(AIR, "none").machine, gpus=tuple(gpus), links=links)
    return [each.number for each in rank_gpus(machine, ranks)]


NVLINKS, NO_LINKS, NO_PEERS = linked({}, "NV18"), linked({}, "PHB"), linked({}, "NV18", "TNS")
UNKNOWN_PEERS = GpuLinks(NVLINKS.ways, {})
ONE_WAY = [  # what the driver says of one direction alone
    GpuLinks(NVLINKS.ways, NVLINKS.peers | {pair: "NS" for pair in NVLINKS.peers if (pair[0] < pair[1]) == upwards})
    for upwards in (False, True)
]
HALF_KNOWN = GpuLinks({pair: "PHB" for pair in NVLINKS.ways if pair[0] > pair[1]}, {})


@pytest.mark.parametrize("name", ["2xh200", "2xa100", "2xh100"])
@pytest.mark.parametrize(
    ("links", "lane"),
    [
        (GpuLinks(), "NVLink"), (NVLINKS, "NVLink"), (UNKNOWN_PEERS, "NVLink"),
        (GpuLinks(NVLINKS.ways, dict.fromkeys(NVLINKS.ways, "U")), "NVLink"),  # the driver does not know
        (NO_LINKS, "mapped CPU memory"), (GpuLinks(NO_LINKS.ways, {}), "mapped CPU memory"),
        (NO_PEERS, "mapped CPU memory"), (GpuLinks({}, NO_PEERS.peers), "mapped CPU memory"),
        *((each, "mapped CPU memory") for each in (*ONE_WAY, HALF_KNOWN)),
    ],
)  # fmt: skip
def test_cards_of_nvlink_count_as_such_where_it_joins_them(name: str, links: GpuLinks, lane: str) -> None:
    """In virtual machines, and without a switch, the same cards have no links, or do not reach each other's memory."""
    asked = with_links(question(AIR, name, tp=2), links)
    plan = asked.plan()
    assert decision(plan, "sums of ranks").value == lane
    assert plan.gpu.no_nvlink == (lane != "NVLink")
    usual = question(AIR, name, tp=2)
    seconds, by_name = (each.predicted(each.plan()).decode[1].parts[SUMS] for each in (asked, usual))
    assert seconds == by_name if lane == "NVLink" else seconds > 2 * by_name


def test_a_way_is_not_chosen_for_links_that_are_not_there() -> None:
    """Sums through CPU memory were not measured, so they count twice."""
    asked = question(AIR, "4xh200")
    assert way(asked) == way(with_links(asked, NVLINKS)) == "--tp 4"
    assert way(with_links(asked, NO_PEERS)) == way(with_links(asked, NO_LINKS)) != "--tp 4"


def test_links_by_pairs_join_two_of_four() -> None:
    """As bridges do."""
    bridged = linked({(0, 2): "NV12", (1, 3): "NV12"})
    asked = with_links(question(AIR, "4xh100", tp=2), bridged)
    plan = asked.plan()
    assert decision(plan, "GPUs").value == "0, 2" and decision(plan, "sums of ranks").value == "NVLink"
    four = with_links(question(AIR, "4xh100", tp=4), bridged).plan()
    assert decision(four, "sums of ranks").value == "mapped CPU memory"


def test_a_described_machine_has_not_the_links_of_this_one() -> None:
    here = replace(question(AIR, "2xh200").machine, links=NO_PEERS)
    assert wished_machine(MachineWish(gpus="2xh200"), here).links == GpuLinks()
    assert wished_machine(MachineWish(ram="64GB"), here).links == NO_PEERS


MATRIX = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tPIX\t0-3\nGPU1\tPIX\t X \t0-3\n"


def test_the_driver_is_asked_where_there_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def ask(*words: str) -> str:
        asked.append(words)
        return MATRIX.replace("PIX", "NS") if "-p2p" in words else MATRIX

    links = gpu_links(ask)
    assert links.ways[0, 1] == "PIX" and links.peers[1, 0] == "NS" and sorted(asked) == [
        ("topo", "-m"), ("topo", "-p2p", "r")
    ]  # fmt: skip
    assert gpu_links(lambda *words: "") == GpuLinks()
    monkeypatch.setattr(detection, "gpu_links", lambda: links)
    for count, expected in ((1, GpuLinks()), (2, links)):
        monkeypatch.setattr(detection, "detect_gpus", lambda count=count: (tuple(map(gpu, range(count))), ""))
        assert Machine.detect_cpus().with_gpus().links == expected
    assert machine_links.HOPS["PIX"] == links.hops(0, 1) and links.hops(0, 1) < GpuLinks().hops(0, 1)


def test_equal_gpus_are_taken_wherever_they_stand() -> None:
    small, first, second = gpu(0, 24, "NVIDIA L4"), gpu(1), gpu(2)
    for order in permutations((small, first, second)):
        assert numbers(list(order)) == [1, 2]
    assert kinds_of((small, first, second)) == [(small,), (first, second)]
    assert most_equal((small, first, second)) == (first, second) and most_equal(()) == ()
    two_kinds = [gpu(0, 24, "L4"), gpu(1, 24, "L4"), gpu(2), gpu(3)]
    assert numbers(two_kinds) == [2, 3]  # the larger
    slow, fast = "NVIDIA A100 80GB PCIe", "NVIDIA H100 80GB HBM3"
    assert numbers([gpu(0, name=slow), gpu(1, name=slow), gpu(2, name=fast), gpu(3, name=fast)]) == [2, 3]
    assert numbers([small, first]) == [0, 1] and numbers([first]) == [1]  # which are refused


def test_what_others_use_is_taken_last() -> None:
    taken = gpu(0, free=0.5)
    assert numbers([taken, gpu(1), gpu(2)]) == [1, 2]
    assert numbers([gpu(0), replace(gpu(1), divided=True), gpu(2)]) == [0, 2]
    assert numbers([taken, gpu(1, free=0.1), gpu(2, free=0.4)]) == [0, 2]  # the emptiest of those
    assert numbers([gpu(3), gpu(2), gpu(1, free=0.9), gpu(0, free=0.95)], 3) == [0, 1, 2]  # nearly free is free


def test_near_gpus_are_taken() -> None:
    one_elsewhere = linked({(1, 3): "PIX", (0, 1): "NODE", (0, 3): "NODE", (2, 3): "SYS"})
    gpus = [gpu(number) for number in NUMBERS]
    assert numbers(gpus, 2, one_elsewhere) == [1, 3]
    assert numbers(gpus, 3, one_elsewhere) == [0, 1, 3]
    assert numbers(gpus[:3], 2, one_elsewhere) == [0, 1]
    assert numbers(gpus, 2) == [0, 1] and numbers(gpus, 2, linked({})) == [0, 1]  # all alike
    assert numbers(gpus, 2, linked({(2, 3): "NV4", (0, 1): "PIX"})) == [2, 3]
    assert numbers(gpus, 2, linked({(2, 3): "NV4", (0, 1): "PIX"}, peers="CNS")) == [0, 1]  # of which nobody can write
    half = linked({(2, 3): "NV4", (0, 1): "PIX"})
    for one_way in ((2, 3), (3, 2)):
        assert numbers(gpus, 2, GpuLinks(half.ways, half.peers | {one_way: "CNS"})) == [0, 1]


def test_the_order_of_the_user_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """`machine.gpus` is in that order. Of unequal GPUs the first equal ones."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0,1")
    near = linked({(0, 1): "NV18"})
    assert numbers([gpu(2), gpu(0), gpu(1)], 2, near) == [2, 0]
    assert numbers([gpu(2, free=0.3), gpu(0), gpu(1)], 2) == [2, 0]
    assert numbers([gpu(2, 24, "L4"), gpu(1), gpu(0)], 2) == [1, 0]
    assert numbers([gpu(2, 24, "L4"), gpu(0), gpu(3), gpu(1, 24, "L4")], 2) == [2, 1]


def test_many_gpus_are_looked_through_in_no_time() -> None:
    assert numbers([gpu(number) for number in range(64)], 8) == list(range(8))


@pytest.mark.parametrize("gpus", ["24GB,h200,h200", "h200,24GB,h200", "h200,h200,24GB"])
def test_ranks_are_chosen_among_unequal_gpus(gpus: str) -> None:
    asked = question(AIR, gpus)
    equal = ", ".join(str(number) for number, word in enumerate(gpus.split(",")) if word == "h200")
    choice = choose_way(asked.config, asked.model, asked.machine, asked.stored)
    assert choice.decision.value == "--tp 2" and choice.decision.reason.startswith(f"GPUs {equal}: ")
    plan = report(AIR, asked).plan
    assert decision(plan, "GPUs").value == equal and plan.gpu.name == "h200"
    (note,) = [each for each in plan.notices if "not used" in each]
    assert note.endswith("--tp 2 uses 2; CUDA_VISIBLE_DEVICES says which")


def test_speeds_are_those_of_the_gpus_that_are_used() -> None:
    """Not of the machine's first one."""
    alone, mixed = question(AIR, "2xh200", tp=2), question(AIR, "24GB,2xh200", tp=2)
    assert alone.predicted(alone.plan()).decode[1].middle == pytest.approx(
        mixed.predicted(mixed.plan()).decode[1].middle
    )
    one, two = question(AIR, "24GB,2xh200"), question(AIR, "2xh200,24GB")
    ways = [[each.change for each in ways_to_go_faster(asked, asked.plan())] for asked in (one, two)]
    assert all("--tensor-parallel-size 2" in each for each in ways)


def test_ranks_that_were_asked_for_are_refused_only_where_no_two_are_equal() -> None:
    assert decision(question(AIR, "24GB,2xh200", tp=2).plan(), "GPUs").value == "1, 2"
    with pytest.raises(ConfigError, match="on equal GPUs, not on a GPU of 24 GiB and h200"):
        question(AIR, "24GB,h200", tp=2).plan()


def test_followers_take_the_gpus_that_the_first_rank_chose(tmp_path) -> None:
    """Which loads already: by then other GPUs look free."""
    asked = question(AIR, "none", tp=2)
    machine = replace(asked.machine, gpus=(gpu(0, free=0.5), gpu(1), gpu(2)))
    plan = replace(asked, machine=machine).plan()
    assert plan.gpu.rank_uuids == ("GPU-1", "GPU-2")
    later = replace(machine, gpus=(gpu(0), gpu(1, free=0.1), gpu(2, free=0.1)))
    for rank, uuid in enumerate(plan.gpu.rank_uuids):
        for seen in (later, replace(machine, gpus=())):  # a follower asks no driver
            own = own_side(asked.config, seen, rank)
            assert rank_plan(plan, *own, rank).gpu.uuid == uuid
    other = replace(plan, gpu=replace(plan.gpu, rank_uuids=("GPU-0", "GPU-9")))
    (tmp_path / "m.gpus.0").write_bytes(",".join(plan.gpu.rank_uuids).encode())
    assert gpus_of_first(other, Meeting(1, 2, str(tmp_path / "m"))).gpu.rank_uuids == plan.gpu.rank_uuids
