"""`python -m tandem.server.front.fits`: whether a model would fit now, and if not, whether it would without others.

JSON comes through stdin: `flags`, a command line, and `loaded`, process ids of servers of other models. JSON goes to
stdout: `why` it does not fit, "" where it does, and whether it is `possible` once those have ended.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from tandem.engine.start.gpu_claims import asks_others, beside_others, with_claims
from tandem.engine.start.planning import planned
from tandem.errors import ConfigError, DoesNotFit, TandemError
from tandem.flags.engine_config import EngineConfig
from tandem.flags.ways import on_one_gpu
from tandem.hub.names import hub_name
from tandem.hub.snapshot import find_snapshot
from tandem.kernels.this_machine import this_machine
from tandem.machine.machine import Machine
from tandem.machine.memory_claims import Claim, memory_claims
from tandem.planner.plan import Plan


def verdict(flags: Sequence[str], loaded: Iterable[int]) -> tuple[str, bool]:
    """Why the model does not fit now, and whether it would without what the processes `loaded` hold."""
    config = on_one_gpu(EngineConfig.from_args(flags))
    if _is_to_be_fetched(config.model):  # its size is known once it is here; its own plan looks again
        return "", True
    machine, freed = machines(config, family_of(loaded))
    plan, why = _plan(config, machine)
    if plan is not None and (plan.gpu is not None or freed == machine):
        return "", True
    later, why_not = _plan(config, freed)
    if plan is not None:  # beside the others it would do without the GPU
        return ("", True) if later is None or later.gpu is None else ("the GPU is taken by other models", True)
    return (why, True) if later is not None else (why_not, False)


def _is_to_be_fetched(model: str) -> bool:
    if Path(model).expanduser().exists():
        return False
    name = hub_name(model)
    return name is not None and ((snapshot := find_snapshot(name)) is None or snapshot.model is None)


def _plan(config: EngineConfig, machine: Machine) -> tuple[Plan | None, str]:
    try:
        return planned(config, machine).plan, ""
    except DoesNotFit as error:
        return None, str(error)


def machines(config: EngineConfig, processes: set[int]) -> tuple[Machine, Machine]:
    """The machine now, and as it will be when these processes have ended. What other servers are about to take counts
    as taken, as it does for a start."""
    with memory_claims(config.model) as claims:
        machine, others = this_machine(), list[Claim]()
        if asks_others(config, machine):
            with claims.turn():
                machine, others = beside_others(machine, claims, this_machine)
    freed = without(machine, processes)
    stay = [_beside_more(claim, machine, freed) for claim in others if claim.pid not in processes]
    return with_claims(config, machine, others), with_claims(config, freed, stay)


def _beside_more(claim: Claim, machine: Machine, freed: Machine) -> Claim:
    """The claim, which leaves more once the machine is freed."""
    before = {gpu.uuid: gpu.free_bytes for gpu in machine.gpus}
    more = {gpu.uuid: gpu.free_bytes - before[gpu.uuid] for gpu in freed.gpus}
    left = {uuid: nbytes + more.get(uuid, 0) for uuid, nbytes in claim.gpu_left_bytes.items()}
    ram, more_ram = claim.ram_left_bytes, freed.available_memory - machine.available_memory
    return msgspec.structs.replace(claim, gpu_left_bytes=left, ram_left_bytes=None if ram is None else ram + more_ram)


def without(machine: Machine, processes: Iterable[int]) -> Machine:
    """The machine as it will be when these processes have ended."""
    pids = set(processes)
    memory = min(machine.total_memory, machine.available_memory + sum(map(own_bytes, pids)))
    held = gpu_bytes(pids) if machine.gpus and pids else {}
    gpus = (
        replace(gpu, free_bytes=min(gpu.memory_bytes, gpu.free_bytes + held.get(gpu.uuid, 0)))
        if held or not pids
        else replace(gpu, free_bytes=gpu.memory_bytes)  # a container is not told what its processes hold
        for gpu in machine.gpus
    )
    return replace(machine, available_memory=memory, gpus=tuple(gpus))


def family_of(roots: Iterable[int]) -> set[int]:
    """These processes and all that they started."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(folder.name))
    family, new = set[int](), list(roots)
    while new:
        pid = new.pop()
        family.add(pid)
        new += children.get(pid, [])
    return family


def own_bytes(pid: int) -> int:
    """Memory that no file backs, so that it is free when the process ends."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        return sum(1024 * int(kb) for kb in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", status, re.M))
    return 0


def gpu_bytes(pids: set[int]) -> dict[str, int]:
    """Bytes of each GPU that these processes hold, by its UUID; empty where the driver does not tell."""
    query = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    held: dict[str, int] = {}
    for line in output.splitlines():
        uuid, pid, mib = (part.strip() for part in line.split(","))
        if pid.isdigit() and int(pid) in pids and mib.isdigit():
            held[uuid] = held.get(uuid, 0) + (int(mib) << 20)
    return held


def main() -> None:
    request = json.load(sys.stdin)
    try:
        why, possible = verdict(request["flags"], request["loaded"])
    except (ConfigError, TandemError) as error:
        why, possible = str(error), False
    json.dump({"why": why, "possible": possible}, sys.stdout)


if __name__ == "__main__":
    main()
