"""`benchmarks/plan_measured.py --tight`, without a GPU: its plans, its rows, a run on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from plans import GIB, MODEL, machine
from tandem.bench import tight
from tandem.bench.probes import MachineProbe
from tandem.bench.sample import running_plan
from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.this_machine import these_cpus
from tandem.machine.gpus import Gpu
from tandem.machine.machine import TIERS
from tandem.planner.forecast.advice import PlanQuestion
from tandem.planner.forecast.machine_spec import MachineWish, wished_speeds
from tandem.planner.forecast.speeds import Speeds
from tandem.planner.gpu_plan import GPU_WORKSPACE_BYTES
from tandem.spec.stored import StoredFormats

H200 = Gpu("NVIDIA H200", 141 * GIB, 140 * GIB, "gen5 x16", capability=(9, 0))
HOST = replace(machine(16), total_memory=128 * GIB, available_memory=120 * GIB, tiers=TIERS)


def question(case: tight.TightCase) -> PlanQuestion:
    small = tight.cut(HOST, H200, case)
    return tight.tight_question(case, small, wished_speeds(MachineWish(), small, None))


@pytest.mark.parametrize("case", tight.CASES[:2], ids=lambda case: case.name)
def test_its_plans_are_tight_and_fit_its_machine(case: tight.TightCase) -> None:
    """Something is given up for room, little is left, and experts are streamed; the CPU's part is made up in
    seconds."""
    plan = question(case).plan()
    assert plan.gpu is not None and plan.gpu.embedding_in_ram and plan.gpu.sizes.ring_bytes
    vram, ram = plan.ledgers
    assert 0 <= vram.left_bytes < 0.02 * vram.budget_bytes and vram.free_bytes == case.gpu_gib * GIB
    assert ram.total_bytes < 32 * GIB and plan.context_length > 16000


def test_wide_experts_take_the_scratch_of_a_large_gpu() -> None:
    """Three of Mixtral's experts are unpacked at once, and rows of a whole chunk: of 80 GB, with 12 GB free. One expert
    more has no room, so kernels' memory is short, too."""
    (case,) = (case for case in tight.CASES if case.scratch_gib)
    asked = question(case)
    plan, each = asked.plan(), 3 * 4096 * 14336 * 2
    vram, ram = plan.ledgers
    entries = {entry.name: entry.nbytes for entry in vram.entries}
    assert plan.gpu is not None and 0 < plan.gpu.sizes.experts < 4 * 8 and plan.gpu.sizes.ring_bytes
    assert len(asked.model.layers) == 4 and plan.context_length > plan.max_step_tokens == 8192
    rows = 8192 * 2 * 2 * (4096 + 2 * 14336)
    assert entries["workspace"] + entries["attention sums"] == GPU_WORKSPACE_BYTES + 3 * each + rows
    assert 0 <= vram.left_bytes < each and vram.free_bytes == 12 * GIB and ram.total_bytes < 16 * GIB


def test_its_rows_say_what_holds() -> None:
    case = tight.CASES[0]
    asked = question(case)
    plan = asked.plan()
    total, predicted = plan.ledgers[0].total_bytes, asked.predicted(plan)
    good = tight.MemoryFigures(
        int(total * 0.98), total, total, 2048, predicted.prompt.middle, predicted.decode[1].middle
    )
    found = tight.rows(case, asked, plan, good)
    assert [row["what"] for row in found] == ["memory", "decoding", "prompt of 2048"]
    assert all(row["holds"] for row in found) and found[0]["gpu_ratio"] == pytest.approx(0.98, abs=1e-3)
    assert "embedding in CPU memory" in found[0]["given_up"]
    steps = sum(found[0]["planned"].get(name, 0) for name in ("workspace", "attention sums", "prompt scratch"))
    assert found[0]["workspace_planned"] == steps + found[0]["planned"]["graph logits"]
    assert found[0]["workspace_planned"] - found[0]["workspace_used"] == total - good.used
    slow, fast = predicted.decode[1].low * 0.9, predicted.prompt.high * 1.1
    bad = good._replace(used=int(total * 1.04), prompt=fast, decode=slow)
    assert not any(row["holds"] for row in tight.rows(case, asked, plan, bad))


def test_a_whole_plan_runs_with_made_up_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU; the GPU's free memory is made up."""
    free = iter([90, 70, 40, 50])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(free), 100))
    host, speeds = these_cpus(), Speeds().having("measured", dram_gbps=50.0, cpu_flops=1e12)
    flags = {"context_length": 2100, "max_running_requests": 1, "device": "cpu", "kt_method": "INT4"}
    config = EngineConfig.from_keywords("m", **flags)
    model = replace(MODEL, layers=MODEL.layers[:2], tied_embeddings=False)
    asked = PlanQuestion(config, model, host, StoredFormats(), speeds)
    plan = replace(asked.plan(), radix_cache=False)
    seen = tight.ran(running_plan(asked, plan, model), plan, 100, MachineProbe(host))
    assert seen.used == 60 and seen.prompt_tokens == 2048 and seen.prompt > 0 and seen.decode > 0


def test_without_a_gpu_nothing_is_held() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU to hold")
    with pytest.raises(ConfigError, match="holds GPU memory ended at once"), tight.held(GIB):
        pytest.fail("held")
