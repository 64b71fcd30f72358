"""benchmarks/peers/kt_kernel_turns.py without kt-kernel: weights, Tandem's side, and a run whose other side is fake."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tandem.bench.kernels.experts import ExpertShape
from tandem.formats import reference
from tandem.machine.machine import Machine

FOLDER = Path(__file__).parents[2] / "benchmarks" / "peers"
SHAPE = ExpertShape("tiny", 256, 512, 8, 2)
ARITHMETIC = {"exact": 0.006, "int8": 0.04}  # bfloat16 results and products; activations rounded to 1 of 127 steps
NAMES = "BF16", "INT4", "INT8", "FP8", "RAWINT4", "MXFP4"


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    import kt_kernel_sides

    return kt_kernel_sides


def test_a_step_begins_with_the_rows_of_shorter_ones(sides: ModuleType) -> None:
    work = sides.made_up(SHAPE, sides.KINDS["BF16"], 100, 1)
    (few, _), (many, weights) = work.routing(4, 3), work.routing(100, 3)
    assert torch.equal(many[:4], few) and many.is_contiguous() and many.dtype == torch.int64
    assert work.routing(100, sides.ROUTINGS - 1)[0].shape == (100, 2)
    assert all(len(set(row)) == 2 for row in work.ids.tolist()) and int(work.ids.max()) < 8
    assert torch.allclose(weights.sum(1), torch.ones(100)) and work.layers == 1
    assert len({hash(tuple(m[0].flatten().tolist())) for m in work.sets}) == sides.SETS


@pytest.mark.parametrize("name", NAMES)
def test_our_side_computes_what_is_expected(sides: ModuleType, name: str) -> None:
    threads = torch.get_num_threads()
    kind = sides.KINDS[name]
    work = sides.made_up(SHAPE, kind, 6, 3 * SHAPE.experts * SHAPE.weights_per_expert * kind.bits // 8)
    right = {key: torch.tensor(rows).double() for key, rows in sides.expected(work).items()}
    torch.set_num_threads(threads)
    ours = sides.Ours(work, Machine.detect(), 1)
    for way in ("exact", "int8")[: 1 + kind.int8_here]:
        out = torch.empty(6, SHAPE.hidden, dtype=torch.bfloat16)
        calls = ours.calls(way, 6, out)
        assert len(calls) == 3 * sides.ROUTINGS
        for layer in range(3):  # of the first routing
            calls[layer]()
            error = (out[: sides.CHECKED].double() - right["ours"]).norm() / right["ours"].norm()
            assert error < ARITHMETIC[way]
    if not kind.stored:
        assert (right["peer"] - right["exact"]).norm() <= 0.5 * right["exact"].norm()


def test_stored_codes_mean_the_same_in_its_form(sides: ModuleType) -> None:
    matrix = sides.made_up(SHAPE, sides.KINDS["RAWINT4"], 1, 1).sets[1][0]
    codes, scales = sides.peer_codes(matrix, sides.KINDS["RAWINT4"])
    numbers = torch.stack((codes & 15, codes >> 4), -1).flatten(1).float() - 8
    assert torch.equal(numbers * scales.float().repeat_interleave(32, 1), reference.decoded(matrix))
    matrix = sides.made_up(SHAPE, sides.KINDS["FP8"], 1, 1).sets[1][2]
    codes, scales = sides.peer_codes(matrix, sides.KINDS["FP8"])
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(codes.view(torch.float8_e4m3fn).float() * spread, reference.decoded(matrix))


def test_matrices_are_repeated_without_more_memory(sides: ModuleType) -> None:
    matrices = [torch.full((64, 32), float(number)).bfloat16() for number in range(3)]
    repeated = sides.Repeated(matrices, 7)
    words = torch.frombuffer((ctypes.c_int16 * (7 * 2048)).from_address(repeated.address), dtype=torch.bfloat16)
    assert torch.equal(words.view(7, 2048)[:, ::2047], torch.tensor([[n % 3.0] * 2 for n in range(7)]).bfloat16())
    with pytest.raises(ValueError, match="no whole pages"):
        sides.Repeated([torch.ones(3).bfloat16()], 2)


def test_a_missing_extension_is_named(sides: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="unpack the wheel of kt-kernel"):
        sides.extension(tmp_path, "amx")


FAKE = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import kt_kernel_turns as turns
from kt_kernel_sides import Ours
from tandem.machine.machine import Machine

class Fake(Ours):
    def __init__(self, work, folder, variant, threads):
        if work.kind.ours == "fp8":
            raise RuntimeError("no such kernel")
        super().__init__(work, Machine.detect(), threads)

turns.Peer = Fake
sys.exit(turns.main())
"""


def test_rows_of_a_run_and_what_a_failure_costs(tmp_path: Path) -> None:
    """Processes are forked from one that has no threads yet, so the run is a program of its own."""
    out = tmp_path / "rows.jsonl"
    words = ["--peer", str(tmp_path), "--shape", "256x256x8x2", "--threads", "1", "--working-set-mib", "1"]
    words += ["--slice", "0.001", "--tokens", "1", "--tokens", "5", "--out", str(out), "--logs", str(tmp_path)]
    words += ["--format", "INT8", "--format", "FP8", "--seconds", "60", "--peer-threads", "1"]
    command = [sys.executable, "-c", FAKE, str(FOLDER), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert done.stdout.splitlines() == out.read_text().splitlines()
    lost = [row for row in rows if "lost" in row]
    assert [row["format"] for row in lost] == ["FP8"] and "no such kernel" in lost[0]["lost"]
    kept = [(row["tokens"], row["activations"]) for row in rows if "lost" not in row]
    assert kept == [(1, "bf16"), (1, "int8"), (5, "bf16"), (5, "int8")]
    for row in rows[:4]:
        assert (row["bench"], row["peer"], row["version"], row["format"]) == ("peers", "kt-kernel", "0.7.2", "INT8")
        assert row["ratio"] == pytest.approx(row["us_peer"] / row["us"], rel=0.05) and row["threads_peer"] == 1
        assert row["error"] < 0.04 and row["error_rounded"] < ARITHMETIC["int8"] and row["date"] and row["commit"]
