"""Fixtures that several test files share, and how tests are divided among processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import fault_table
import late_gpu
import pytest
from fault_table import fault as fault  # a fixture
from hypothesis import settings

import scheduling

CPUS = os.sched_getaffinity(0)
settings.register_profile("fuzz", max_examples=1500, deadline=None)  # `make fuzz`


def pytest_addoption(parser: pytest.Parser) -> None:
    scheduling.add_options(parser)
    parser.addoption("--write-faults", type=Path, metavar="DIR", help="keep what tests marked `fault` saw")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("numprocesses", None):  # in a worker it is None
        scheduling.use_one_torch_thread()
    scheduling.full = scheduling.runs_full(config)
    if late := config.getoption("--late-gpu"):
        late_gpu.make_late(late)
    if config.getoption("--store-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(scheduling.Durations())
    if (folder := config.getoption("--write-faults")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(fault_table.FaultRows(folder))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The process that gives tests to others collects none."""
    with scheduling.collected_is_kept():
        return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    scheduling.check_names(items)
    scheduling.leave_out_full(config, items)
    scheduling.leave_out_other_parts(config, items)
    scheduling.longest_first(items)


def pytest_collection_finish() -> None:
    scheduling.let_workers_sleep()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Only called by pytest-xdist, for `-n 2`."""
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # the order is ours
    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = scheduling.group_of
    return scheduler


@pytest.fixture(autouse=True)
def default_signals() -> None:
    """Ctrl+C raises KeyboardInterrupt: a server that a test ran in this process may have left its own handlers, which
    do nothing any more, and what runs in the background has it ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def all_cpus() -> Iterator[None]:
    """An engine that is loaded in this process pins its thread. The next test, and what it starts, has all CPUs."""
    yield
    os.sched_setaffinity(0, CPUS)


@pytest.fixture(scope="session")
def demo_dir() -> Path:
    """The demo model, built in the user's cache as `make serve` does (half a minute, once per machine)."""
    from tandem.checkpoint import resolve_model
    from tandem.checkpoint.demo import build_demo

    return build_demo(resolve_model("demo"))


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory):
    """`tiny_models["glm4_moe"]` is a directory with a tiny random model of that family and a byte tokenizer."""
    from tiny import TinyModels

    return TinyModels(tmp_path_factory.mktemp("tiny"))
