"""The worker pool: its C++ contract test, plain and under the thread sanitizer, and its Python face; what tasks are."""

from __future__ import annotations

import os
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tandem import _core

ROOT = Path(__file__).parents[2]


LAYER = {  # what a layer of experts on the scalar tier needs
    "experts/store": "expert_store expert_bytes expert_rows cpu_slots node_slices",
    "experts/run": "expert_forward down foreseen_forward own_pairs routing_plan",
    "ops": "workspace integer_rows",
    "format": "grids interleave layout pack quantise scale_table staged",
    "runtime": "worker_pool memory bulk_copy",
    "runtime/files": "mapped_file readable_file",
    "tier/scalar": "vectors",
}
POSTS = {
    **LAYER,
    "experts/handoff": "mailbox post_thread",
    "experts/run": f"{LAYER['experts/run']} foresight",
}
SOURCES = {  # of csrc, beside the test itself
    "task_sizes_test": [],
    "own_pairs_test": ["runtime/worker_pool", "experts/run/own_pairs"],
    "expert_layer_test": [f"{part}/{name}" for part, names in LAYER.items() for name in names.split()],
    "post_thread_test": [f"{part}/{name}" for part, names in POSTS.items() for name in names.split()],
}


@pytest.fixture(scope="module")
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all: what two tests compile with the same flags is compiled once."""
    return tmp_path_factory.mktemp("pool")


def build_and_run(folder: Path, *flags: str, test: str = "worker_pool_test", brief: bool = False) -> str:
    """brief: fewer rounds, where a test has them."""
    program = folder / f"{test}-{len(flags)}"
    sources = [ROOT / f"csrc/{name}.cc" for name in SOURCES.get(test, ["runtime/worker_pool"])]
    with ThreadPoolExecutor(2) as builders:
        both = [ROOT / f"tests/cpp/{test}.cc", *sources]
        objects = list(builders.map(lambda source: compiled(folder, source, flags), both))
    compiler(flags, *objects, "-o", program)
    surroundings = os.environ | ({"TANDEM_BRIEF": "1"} if brief else {})
    done = subprocess.run(
        [str(program)], check=False, capture_output=True, text=True, timeout=250, env=surroundings
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def compiled(folder: Path, source: Path, flags: tuple[str, ...]) -> Path:
    """The object file, which another test may have made."""
    to = folder / "".join(flags).replace("/", "_") / f"{source.stem}.o"
    if not to.exists():
        to.parent.mkdir(exist_ok=True)
        compiler(flags, "-c", source, "-o", to)
    return to


def compiler(flags: tuple[str, ...], *arguments: object) -> None:
    command = ["c++", "-std=c++20", "-O1", "-g", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'src/tandem'}", *flags, "-pthread"]
    subprocess.run([*command, *map(str, arguments)], check=True, capture_output=True, text=True)


def test_contract(tmp_path: Path) -> None:
    assert build_and_run(tmp_path, brief=True) == "worker_pool_test: ok\n"


@pytest.mark.full
def test_contract_often(tmp_path: Path) -> None:
    assert build_and_run(tmp_path) == "worker_pool_test: ok\n"


def test_tasks_have_every_pair_once(tmp_path: Path) -> None:
    assert build_and_run(tmp_path, test="task_sizes_test") == "task_sizes_test: ok\n"


def test_every_pair_belongs_to_who_fetches_it(tmp_path: Path) -> None:
    assert build_and_run(tmp_path, test="own_pairs_test") == "own_pairs_test: ok\n"


def test_early_tasks_where_threads_are_slow_at_the_worst_moments(tmp_path: Path) -> None:
    pauses = f"{ROOT / 'tests/cpp/pool_pauses.h'}"
    assert build_and_run(tmp_path, "-include", pauses, test="early_tasks_test") == "early_tasks_test: ok\n"


@pytest.mark.full
def test_contract_under_thread_sanitizer(tmp_path: Path) -> None:
    assert build_and_run(tmp_path, "-fsanitize=thread") == "worker_pool_test: ok\n"


@pytest.mark.full
def test_early_tasks_under_thread_sanitizer(tmp_path: Path) -> None:
    assert build_and_run(tmp_path, "-fsanitize=thread", test="early_tasks_test") == "early_tasks_test: ok\n"


@pytest.mark.full
def test_expert_layer_under_thread_sanitizer(tmp_path: Path) -> None:
    """Nobody overwrites a round's results while they are added up, and a call's fit their scratch."""
    flags = ("-fsanitize=thread", "-DTANDEM_RESULT_BYTES=262144")
    assert build_and_run(tmp_path, *flags, test="expert_layer_test") == "expert_layer_test: ok\n"


@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    [(), ("-fsanitize=thread",), ("-fsanitize=address,undefined",)],
    ids=["plain", "thread_sanitizer", "address_sanitizer"],
)
def test_posts_are_answered_by_a_thread_of_their_own(tmp_path: Path, flags: tuple[str, ...]) -> None:
    assert build_and_run(tmp_path, *flags, test="post_thread_test") == "post_thread_test: ok\n"


def test_python_threads_share_one_pool() -> None:
    pool = _core.WorkerPool([-1, -1], spin_us=50)
    latencies: list[float] = []
    threads = [threading.Thread(target=lambda: latencies.append(pool.start_latency(300))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(latencies) == 6 and len(pool) == 2


def test_bad_cpus_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        _core.WorkerPool([])
    with pytest.raises(ValueError, match="CPU 99999"):
        _core.WorkerPool([0, 99999])


def test_tiers_start_at_the_baseline() -> None:
    order = ["scalar", "avx2", "avx512", "avx512_bf16", "amx"]
    tiers = _core.cpu_tiers()
    assert tiers == order[: len(tiers)] and tiers
    assert _core.supported_tiers() == [tier for tier in tiers if tier in _core.built_tiers()]
    flags = Path("/proc/cpuinfo").read_text()
    assert ("avx2" in tiers) == (" avx2 " in flags)
