"""Ranks on GPUs: sums and columns are those of their summands, tokens those of one rank, and whoever is gone is named.

Each rank is a process with a GPU of its own, where there are several; else they share one and wait for each other.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ranks.gpu_rank
from gpu import needs_cuda
from gpu_sessions import on_the_cpu, rms
from ranks.gpu_rank import CASES, case_name

pytestmark = [pytest.mark.gpu, needs_cuda]
RANKS, SECONDS = 2, 240
VARIANTS = [
    "qwen3_moe-gpu", "glm4_moe", "gpt_oss", "minimax_m2", "deepseek_v3-plain", "qwen3_next", "deepseek_v4-hub",
]  # fmt: skip
SUMS = """
import sys, time, torch
from pathlib import Path
from tandem.kernels.gpu.ranks.gpu_group import GpuGroup
from tandem.kernels.ranks.meeting import Meeting
from tandem.errors import RankLost
folder, rank, lane, how, ranks = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5])
device = torch.device("cuda", rank % torch.cuda.device_count())
torch.cuda.set_device(device)
meeting = Meeting(rank, ranks, f"{folder}/{lane}", 60.0)
group = GpuGroup(meeting, device, (lane,))
def example(of, rows, columns, dtype):
    generator = torch.Generator().manual_seed(1000 * rows + columns + of)
    return torch.randn(rows, columns, generator=generator).to(device, dtype)
for dtype in (torch.bfloat16, torch.float32):
    for rows, columns in [
        (1, 8), (1, 7168), (3, 2048), (8, 7168), (33, 2880), (128, 2048), (96, 4096), (300, 4096), (1111, 7168),
    ]:
        each = [example(of, rows, columns, dtype) for of in range(ranks)]
        right = each[0].float()
        for other in each[1:]:
            right = right + other.float()
        right = right.to(dtype)
        for _ in range(3):
            assert torch.equal(group.sum(each[rank].clone()), right), (dtype, rows, columns)
    for rows, whole in [(1, 100), (5, 32003), (64, 15193)]:
        columns = torch.arange(rows * whole, device=device).view(rows, whole).to(dtype)
        each = -(-whole // ranks)
        own = columns[:, each * rank : each * (rank + 1)]
        assert torch.equal(group.gather(own, whole), columns), (dtype, rows, whole)
assert group.sum(torch.empty(0, 64, dtype=torch.bfloat16, device=device)).shape == (0, 64)
assert group.gather(torch.empty(0, 64, device=device), 128).shape == (0, 128)  # of a chunk without logits
group.check()
meeting.share("right", b"-")
if how != "ends":
    group.be_patient(1.0)
    if rank == 1:
        time.sleep(60) if how == "sleeps" else sys.exit(0)
    started = time.monotonic()
    rows = group.sum(torch.ones(1, 4096, dtype=torch.bfloat16, device=device))
    torch.cuda.synchronize()
    assert torch.isnan(rows).all()
    again = group.sum(torch.ones(1, 4096, dtype=torch.bfloat16, device=device))
    torch.cuda.synchronize()
    seconds = time.monotonic() - started
    assert torch.isnan(again).all() and seconds < 3.0, seconds
    try:
        group.check()
    except RankLost as error:
        assert "rank 1 did not answer" in str(error), error
        print("named", seconds, flush=True)
    else:
        raise AssertionError("nobody is missed")
print("done", group.text(), flush=True)
"""


def ended(processes: list[subprocess.Popen[str]]) -> str:
    try:
        said = "".join(process.communicate(timeout=SECONDS)[0] for process in processes)
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), said
    return said


def started(arguments: list[str]) -> subprocess.Popen[str]:
    paths = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )  # fmt: skip


@pytest.mark.parametrize("how", ["ends", "leaves"])
@pytest.mark.parametrize("lane", ["peer", "host"])
def test_sums_are_right_and_bounded(tmp_path, lane, how) -> None:
    said = ended([started(["-c", SUMS, str(tmp_path), str(rank), lane, how, "2"]) for rank in range(RANKS)])
    print(said)
    assert said.count("done") == (RANKS if how == "ends" else 1)


@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize("lane", ["peer", "host"])
def test_more_ranks_sum_long_messages_in_two_shots(tmp_path, lane, count) -> None:
    """The last two of its messages are that long; those of three ranks can be too uneven for it."""
    commands = [["-c", SUMS, str(tmp_path), str(rank), lane, "ends", str(count)] for rank in range(count)]
    said = ended([started(command) for command in commands])
    assert said.count("done") == count


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_compute_what_one_does(tiny_models, tmp_path, variant) -> None:
    path = Path(tiny_models[variant])
    script = ranks.gpu_rank.__file__
    print(ended([started([script, str(tmp_path), str(rank), str(RANKS), str(path)]) for rank in range(RANKS)]))
    exact, theirs = on_the_cpu(path, "float32"), on_the_cpu(path, "bfloat16")
    allowed = 1.5 * rms(theirs, exact)
    for case in CASES:
        name = case_name(path, *case)
        (first, chosen), (second, other) = (torch.load(tmp_path / f"{name}.{rank}.pt") for rank in range(RANKS))
        print(f"{name}: {rms(first, exact):.2e} of {allowed:.2e}")
        assert torch.equal(first, second) and torch.equal(chosen, other), name
        assert rms(first, exact) < allowed, name


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_that_is_gone_in_the_middle_is_named(tmp_path, how) -> None:
    """The other one's sum ends after its patience, and says who was missing."""
    both = [started(["-c", SUMS, str(tmp_path), str(rank), "peer", "sleeps", "2"]) for rank in range(RANKS)]
    try:
        assert both[1].stdout is not None
        while not list(tmp_path.glob("peer.right.1")):
            assert both[1].poll() is None, both[1].stdout.read()
        both[1].send_signal(how)
        said = both[0].communicate(timeout=SECONDS)[0]
    finally:
        for process in both:
            process.kill()
    assert "named" in said, said
