"""`kt bench kernels`: what it writes, on a shape that takes seconds; and the sums behind its columns."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from tandem import _core
from tandem.bench import formats as bench_formats
from tandem.bench.ceilings import Ceilings, DramReader, Roofs, last_level_cache_bytes
from tandem.bench.kernels.experts import (
    ExpertShape,
    StackedExperts,
    Timing,
    Workload,
    packed_layers,
    parse_shape,
    random_expert,
)
from tandem.bench.kernels.run import Bench, ceiling_rows, ceilings_table, fit, result_tables
from tandem.cli.app import app
from tandem.errors import ConfigError
from tandem.kernels.reference import TorchOps

TINY = ExpertShape("64x32x6x2", 64, 32, 6, 2)
BITS = {  # packed, per weight
    "bf16": 16, "f32": 32, "int8": 8.5, "int4": 4.5, "fp8": 8.25, "fp8-row": 8 + 1 / 12, "int4-g64": 4.25,
    "int4-g128": 4.125, "int4-zeros": 4.1875 + 1 / 48, "mxfp4": 4.25, "mxfp8": 8.25, "nvfp4": 4.5 + 1 / 12,
    "q4_0": 4.5, "q4_1": 5, "q8_0": 8.5, "q4_k": 4.625, "q6_k": 6.5625 + 1 / 48,
    "q2_k": 2.625, "q3_k": 3.5625 + 1 / 48, "q5_k": 6.625, "iq4_nl": 4.5, "iq4_xs": 4.3125 + 1 / 48,
    "iq3_s": 3.4375 + 1 / 48, "iq3_xxs": 3.1875 + 1 / 48,
    "iq2_s": 2.5625 + 1 / 48, "iq2_xs": 2.3125 + 1 / 48, "iq2_xxs": 2.1875 + 1 / 48, "iq1_s": 1.6875 + 1 / 48,
}  # fmt: skip
QUICK = ["bench", "kernels", "--shape", TINY.name, "--seconds", "0", "--working-set-mib", "1"]


def test_rows_and_picture(tmp_path: Path) -> None:
    out, plot = tmp_path / "results" / "kernels.json", tmp_path / "roof.png"
    arguments = [*QUICK, "--tokens", "1", "--tokens", "5", "--format", "bf16", "--format", "int4"]
    done = CliRunner().invoke(app, [*arguments, "--out", str(out), "--plot", str(plot)])
    assert done.exit_code == 0, done.output
    report = json.loads(out.read_text())
    assert set(report) == {
        "machine", "threads", "commit", "version", "torch", "command", "date",
        "interrupted", "ceilings", "rows",
    }  # fmt: skip
    assert report["interrupted"] is False
    seen = {(r["bench"], r["format"], r["tokens"]) for r in report["rows"]}
    ours = {("tandem", fmt, tokens) for fmt in ("bf16", "int4") for tokens in (1, 5)}
    theirs = {(f"torch {way}", "bf16", tokens) for way in ("loop", "grouped_mm") for tokens in (1, 5)}
    assert ours <= seen <= ours | theirs and ("torch loop", "bf16", 5) in seen
    for row in report["rows"]:
        assert set(row) >= {
            "bench",
            "shape",
            "format",
            "tier",
            "tokens",
            "ms",
            "value",
            "unit",
            "ceiling",
            "share",
        }
        assert row["ms"] > 0 and row["unit"] in ("GB/s", "TFLOPS")
        assert row["share"] == pytest.approx(row["value"] / row["ceiling"])
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_json_goes_where_a_link_points_and_into_pipes(tmp_path: Path) -> None:
    link, pipe = tmp_path / "link.json", tmp_path / "pipe"
    link.symlink_to(tmp_path / "file.json")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)  # so that writing does not wait
    for out in (link, pipe):
        done = CliRunner().invoke(app, [*QUICK, "--no-torch", "--tokens", "1", "--out", str(out)])
        assert done.exit_code == 0, done.output
    assert link.is_symlink() and json.loads((tmp_path / "file.json").read_text())["rows"]
    assert pipe.is_fifo() and json.loads(os.read(reader, 1 << 16))["rows"]
    os.close(reader)


def test_a_shape_that_does_not_fit_is_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Bench, "measure_roofs", lambda self: pytest.fail("measured before all shapes were checked")
    )
    error = CliRunner().invoke(app, [*QUICK, "--shape", "1048576x1048576x8x8"]).exception
    assert isinstance(error, ConfigError) and "1048576x1048576x8x8" in str(error)


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, measured = tmp_path / "kernels.json", Bench._row

    def interrupted_row(self: Bench, bench: str, work: Workload, *rest: Any) -> Timing:
        if work.tokens == last:
            raise KeyboardInterrupt
        return measured(self, bench, work, *rest)

    monkeypatch.setattr(Bench, "_row", interrupted_row)
    last = 5
    arguments = [*QUICK, "--no-torch", "--tokens", "1", "--tokens", "5", "--out", str(out)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 130 and "Interrupted" in done.output
    report = json.loads(out.read_text())
    assert report["interrupted"] and [row["tokens"] for row in report["rows"]] == [1]
    last = 1  # nothing was measured: nothing is written over what is there
    before = out.read_text()
    assert CliRunner().invoke(app, arguments).exit_code == 130
    assert out.read_text() == before and [file.name for file in tmp_path.iterdir()] == [out.name]


def test_tables_fit_80_columns() -> None:
    roofs = Roofs(reads={1: 17.04, 16: 153.24}, peaks={("avx512_bf16", "bf16"): 1.3512e12})
    work, ceilings = Workload(TINY, 512), roofs.of("avx512_bf16", "int8")
    names = [("tandem", "avx512_bf16"), ("torch loop", "torch"), ("torch grouped_mm", "torch")]
    rows = [work.result(bench, "bf16", tier, 5.80812, ceilings) for bench, tier in names]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(ceilings_table(roofs), *result_tables(rows))
    text = console.export_text()
    assert "\u2026" not in text and all(len(line) <= 80 for line in text.splitlines())
    for name in ("ours avx512_bf16", "torch loop", "torch grouped", TINY.name, "153.2 GB/s"):
        assert name in text
    assert ceiling_rows(roofs)[:2] == [
        {"what": "DRAM read", "threads": 1, "gbps": 17.04},
        {"what": "DRAM read", "threads": 16, "gbps": 153.24},
    ]


def test_ceilings_keep_the_best_of_all_repeats() -> None:
    pool, roofs = _core.WorkerPool([-1], 20), Roofs()
    roofs.reads[1] = roofs.peaks["scalar", "bf16"] = 1e30
    roofs.measure_reads([pool], "scalar", 1 << 20, 0.0)
    roofs.measure_peak(pool, "scalar", "int4", 0.0)
    roofs.measure_peak(pool, "scalar", "f32", 0.0)
    assert roofs.of("scalar", "bf16") == Ceilings(1e30, 1e30)
    assert 0 < roofs.of("scalar", "f32").flops < 1e30


def test_memory_is_read_where_experts_lie() -> None:
    """All of it, of each memory node, some layers at a time; and a buffer of its own, to its last KiB."""
    pool = _core.WorkerPool([-1, -1], 20, [0, 1])
    layers = packed_layers(ExpertShape("s", 256, 128, 2, 2), "f32", "scalar", pool, 3)
    assert all(len(layer.all_cpu_slots()) == 2 for layer in layers)
    held = sum(layer.loaded * layer.bytes_per_expert for layer in layers)
    assert sum(each.bytes for layer in layers for each in layer.all_cpu_slots()) == held
    dense, data = _core.DenseOps(pool, "scalar"), torch.empty(3 * 1024 * 256)
    dense.fill_memory(data, 0.5)
    assert dense.read_memory(data) == data.sum() == len(data) / 2
    whole = torch.cat([layer.packed(expert) for layer in layers for expert in range(2)])
    of_node = [list(ranges) for ranges in zip(*(layer.all_cpu_slots() for layer in layers), strict=True)]
    expected = whole.view(torch.float32).sum().item()
    assert dense.read_ranges(of_node) == pytest.approx(expected, abs=1e-2) and abs(expected) > 0.1
    assert DramReader.of(layers, pool, "scalar").mean_gbps(0.0) > 0


def test_a_row_shows_the_turn_in_the_middle() -> None:
    work, fast, slow = Workload(TINY, 1), Ceilings(100.0, 1e18), Ceilings(50.0, 1e18)
    least = fast.bound_seconds(work.bytes_read("bf16"), work.operations)
    turns = ((2 * least, fast), (1.25 * least, fast), (3 * least, slow))
    row = Timing("tandem", work, "bf16", "t", turns).result()
    assert (row.share, row.ceiling) == (pytest.approx(2 / 3), 50.0)


def test_bad_flags_name_what_to_change() -> None:
    for flags, message in [
        (["--shape", "64x32"], "HIDDENxWIDTHxEXPERTSxTOPK"),
        (["--shape", "64x32x4x5"], "not above the number of experts"),
        (["--format", "int3"], "bf16, f32, int8, int4"),
        (["--tier", "mmx"], "scalar"),
        (["--threads", "100000"], "physical cores"),
    ]:
        error = CliRunner().invoke(app, [*QUICK, *flags]).exception
        assert isinstance(error, ConfigError) and message in str(error)


def test_what_is_read_and_computed() -> None:
    work = Workload(TINY, 1)
    assert work.bytes_read("bf16") == 2 * (3 * 64 * 32) * 2  # two distinct experts of three matrices
    assert work.operations == 2 * (3 * 64 * 32) * 2
    assert Workload(TINY, 500).bytes_read("bf16") == 6 * (3 * 64 * 32) * 2
    memory_bound = Ceilings(read_gbps=1.0, flops=1e18)
    assert work.result("b", "bf16", "t", 1e-3, memory_bound).value == pytest.approx(
        work.bytes_read("bf16") / 1e6
    )
    compute_bound = Ceilings(read_gbps=1e9, flops=1e9)
    row = work.result("b", "bf16", "t", 1e-3, compute_bound)
    assert (row.unit, row.share) == ("TFLOPS", pytest.approx(work.operations / 1e6))


@pytest.mark.parametrize("fmt", bench_formats.FORMATS)
def test_every_format_can_be_measured(fmt: str) -> None:
    """And its size is what the core says that it packs."""
    shape = ExpertShape("s", 512, 256, 2, 2)
    layers = packed_layers(shape, fmt, "scalar", _core.WorkerPool([-1], 20), 1)
    work = Workload(shape, 3)
    y = layers[0].forward(work.x, work.ids[0], work.weights)
    assert y.isfinite().all() and y.any()
    assert bench_formats.expert_bytes(512, 256, fmt) / shape.weights_per_expert * 8 == pytest.approx(
        BITS[fmt], rel=3e-3
    )


def test_block_formats_say_which_sizes_they_need() -> None:
    with pytest.raises(ConfigError, match="q4_k: sizes must be multiples of 256, not 576"):
        parse_shape("demo").expert_bytes("q4_k")


def test_large_shapes_are_cut_to_the_memory() -> None:
    whole, layers = fit(parse_shape("demo"), "bf16", working_set=128 << 20, available_memory=8 << 30)
    assert whole.experts == 32 and layers * 32 * whole.expert_bytes("bf16") >= 128 << 20
    cut, layers = fit(parse_shape("ds3"), "bf16", working_set=128 << 20, available_memory=8 << 30)
    assert cut.experts * cut.expert_bytes("bf16") <= 2 << 30 and cut.experts >= cut.top_k
    with pytest.raises(ConfigError, match="choose a smaller shape"):
        fit(parse_shape("ds3"), "bf16", working_set=128 << 20, available_memory=1 << 30)


def test_torch_ways_compute_the_experts() -> None:
    """Else their times would mean nothing. Three bfloat16 roundings and sums of 64 terms: 2 %."""
    work, experts = Workload(TINY, 9), StackedExperts.random(TINY)
    layer = TorchOps().experts(6, 64, 32)
    for expert in range(6):
        layer.load(expert, *random_expert(TINY))
    ids = work.ids[0]
    expected = layer.forward(work.x, ids, work.weights).float()
    for way in (experts.loop, experts.grouped):
        error = (way(work.x, ids, work.weights).float() - expected).norm() / expected.norm()
        assert error < 0.02


def test_cache_sizes_are_read(tmp_path: Path) -> None:
    for index, size in enumerate(["48K", "2048K", "32M"]):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert last_level_cache_bytes(tmp_path) == 32 << 20
    assert last_level_cache_bytes(tmp_path / "nothing") > 0


def test_int8_activations_are_rows_of_their_own(tmp_path: Path) -> None:
    out = tmp_path / "a8.json"
    flags = ["--format", "int4", "--format", "bf16", "--tokens", "3", "--no-torch", "--int8-activations"]
    done = CliRunner().invoke(app, [*QUICK, *flags, "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "int4 A8" in done.output and "bf16 A8" not in done.output
    report = json.loads(out.read_text())
    assert [(r["bench"], r["format"]) for r in report["rows"]] == [
        ("tandem", "int4"), ("tandem A8", "int4"), ("tandem", "bf16")
    ]  # fmt: skip
    assert {c["format"] for c in report["ceilings"] if c["what"] == "peak"} == {"bf16", "int8 x int8"}
    error = CliRunner().invoke(app, [*QUICK, "--format", "fp8", "--int8-activations"]).exception
    assert isinstance(error, ConfigError) and "integer codes" in str(error)
