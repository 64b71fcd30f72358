"""Servers that choose ranks by themselves, whatever their machine is; and ranks that cannot start."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

CHOOSES = """
import sys
if "tandem.server.engine_process" in sys.orig_argv:
    from tandem.engine.start import loader
    from tandem.flags.ways import way_is_open
    from tandem.planner.choices.decision import Decision
    from tandem.planner.ways import Way, WayChoice
    def chosen_way(config, failed=(), locks=None):
        if not way_is_open(config):
            return loader.ChosenWay(WayChoice(config))
        way, said = (Way(), "one GPU") if "--tp 2" in failed else (Way(ranks=2), "--tp 2")
        return loader.ChosenWay(WayChoice(way.config(config), Decision("parallelism", said, "a stand-in's choice")))
    loader.chosen_way = chosen_way
"""
NO_RANK = """
import sys
if "tandem.server.ranks.process" in sys.orig_argv:
    import torch
    def refuse(*given):
        raise RuntimeError("no memory for a shard")
    torch.set_num_threads = refuse  # the first thing that a rank does
"""
NO_LANE = """
import sys
if "tandem.server.engine_process" in sys.orig_argv:
    from tandem.engine.start import loader
    from tandem.errors import EngineError
    def refuse(*given):
        raise EngineError("no way between GPUs works: peer: wrong sums; host: OSError")
    loader.cpu_group = loader.gpu_group = refuse
"""


def runs_first(code: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Python processes that start from now on run this first."""
    patch.setenv("PYTHONPATH", str(folder), prepend=":")
    (folder / "sitecustomize.py").write_text(code)


def with_nvidia_smi(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """A program of that name, which shows no GPU."""
    program = folder / "nvidia-smi"
    program.write_text("#!/bin/sh\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
