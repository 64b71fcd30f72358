"""What `kt plan` advises is tried before it is said, and what loses nothing comes first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plans import GIB, MODEL, machine, with_gpu
from tandem.bench.architectures import named_subject
from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.machine.machine import Machine
from tandem.planner.forecast.advice import PlanQuestion, least_ram, roundings, ways_to_fit, ways_to_go_faster
from tandem.planner.forecast.compare import compare
from tandem.planner.forecast.machine_spec import MachineWish, system_bytes, wished_machine, wished_speeds
from tandem.planner.forecast.report import report
from tandem.planner.forecast.speeds import Speeds
from tandem.planner.memory import GRAMMAR_BYTES
from tandem.spec.stored import StoredFormat, StoredFormats

WEIGHTS = MODEL.weight_bytes("bfloat16", "bf16")


def question(host: Machine, **flags: object) -> PlanQuestion:
    config = EngineConfig.from_keywords("demo", **flags)
    speeds = wished_speeds(MachineWish(), host, Speeds().having("measured", dram_gbps=50.0, cpu_flops=1e12))
    return PlanQuestion(config, MODEL, host, StoredFormats(), speeds)


def test_a_model_that_fits_needs_no_advice() -> None:
    assert ways_to_fit(question(machine())) == []


def test_flags_that_lose_nothing_come_first() -> None:
    ways = ways_to_fit(question(machine(free=int((WEIGHTS + GIB // 4 + GRAMMAR_BYTES) / 0.85))))
    assert [way.lossy for way in ways] == sorted(way.lossy for way in ways)
    assert ways[0].change == "--mem-fraction-static 0.95" and ways[-1].change.startswith("--kt-method")


def test_memory_that_has_to_be_bought_is_said_in_numbers() -> None:
    host = machine(free=WEIGHTS // 10)
    ways = ways_to_fit(question(host))
    assert [way.lossy for way in ways] == [False, True] and all("of RAM" in way.change for way in ways)
    needed = least_ram(question(host))
    used = max(host.total_memory - host.available_memory, system_bytes(needed))
    for total, fits in ((needed, True), (needed - 2 * GIB, False)):
        other = replace(host, total_memory=total, available_memory=total - used)
        if fits:
            assert question(other).plan()
        else:
            with pytest.raises(ConfigError):
                question(other).plan()


def test_a_machine_whose_programs_take_all_its_memory_is_told_what_it_needs() -> None:
    host = wished_machine(MachineWish(ram="2GB"), machine())
    assert host.available_memory == 0
    ways = ways_to_fit(question(host))
    assert ways and all("of RAM" in way.change for way in ways)


def test_ways_to_go_faster_are_faster() -> None:
    asked = question(with_gpu(free=3 * GIB), kt_gpu_experts_ratio=0.0)
    ways = ways_to_go_faster(asked, asked.plan())
    assert ways and ways[0].change == "without --kt-gpu-experts-ratio"
    assert [way.lossy for way in ways] == sorted(way.lossy for way in ways)


def test_only_smaller_formats_are_advised() -> None:
    int4 = StoredFormat("int4 g32", True, 0.5625, ("RAWINT4", "INT4"), 32)
    fp8 = StoredFormat("fp8 128x128", True, 1.03, ("FP8",), 128)
    assert roundings(StoredFormats()) == ["INT8", "INT4"]
    assert roundings(StoredFormats(int4)) == [] and roundings(StoredFormats(fp8)) == ["INT4"]


def test_compare_ranks_what_can_be_done() -> None:
    rows = compare(question(with_gpu(free=4 * GIB)))
    possible = [row for row in rows if row.decode is not None]
    rates = [row.decode.middle for row in possible if row.decode is not None]
    assert len(possible) > 5 and rates == sorted(rates, reverse=True)
    assert len({(row.method, round(row.planned_share, 3)) for row in possible}) == len(possible)
    assert possible[0].planned_share > possible[-1].planned_share and all(row.why for row in rows[len(possible) :])
    assert {row.method for row in compare(question(machine()))} == {"as stored", "INT8", "INT4"}


def test_what_a_change_does_not_change_is_not_mentioned() -> None:
    ways = ways_to_go_faster(question(machine()), question(machine()).plan())
    assert ways and all("1.00" not in way.brings and "times as fast" in way.brings for way in ways)


def test_is_256_gb_and_a_4090_enough_for_deepseek_v3() -> None:
    model, stored = named_subject("deepseek-v3")
    wish = MachineWish("4090", "256GB", "80GB/s", 16, "avx512_bf16")
    host = wished_machine(wish, machine())
    asked = PlanQuestion(EngineConfig(model="deepseek-v3"), model, host, stored, wished_speeds(wish, host, None))
    found = report("deepseek-v3", asked)
    assert (
        not found.fits and "645.4 GiB" in found.reasons[-1] and "198.7 GiB may be used" in found.reasons[-1]
    )
    (ram,) = (ledger for ledger in found.ledgers if ledger.place == "RAM")
    assert ram.left_bytes < -400 * GIB and {e.name for e in ram.entries} >= {"experts", "embedding"}
    (vram,) = (ledger for ledger in found.ledgers if ledger.place == "VRAM")
    assert vram.left_bytes >= 0 and {e.name for e in vram.entries} >= {"dense weights", "KV cache"}
    assert [way.lossy for way in found.to_fit] == [False, True]
    assert all("of RAM" in way.change for way in found.to_fit)
    as_json = found.as_dict()
    assert as_json["fits"] is False and as_json["ledgers"][1]["left_bytes"] < 0
