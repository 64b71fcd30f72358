"""Several GPUs, for `kt doctor`: which are equal, how they are linked, which are hidden or divided (MIG)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import combinations

from tandem.cli.doctor_checks import Finding
from tandem.flags.env import visible_gpus
from tandem.machine.gpus import Gpu, ask_nvidia_smi, most_equal, present_gpus
from tandem.machine.links import Ask, GpuLinks, Pair, gpu_links
from tandem.machine.machine import Machine

WAYS = {
    "PIX": "a PCIe switch", "PXB": "PCIe switches", "PHB": "PCIe through the CPU",
    "NODE": "PCIe through the bridges of a NUMA node", "SYS": "PCIe and the link of CPU sockets",
}  # fmt: skip
PEER_STATES = {
    "CNS": "the chipset cannot", "GNS": "the GPUs cannot", "TNS": "the topology cannot", "NS": "not supported",
}  # fmt: skip
_DIVIDED = "--query-gpu=index,mig.mode.current"


def several_gpus(
    machine: Machine, ask: Ask = ask_nvidia_smi, present: tuple[Gpu, ...] | None = None
) -> Iterator[Finding]:
    """Nothing of a machine with one GPU that is whole and not hidden. present: as nvidia-smi shows them."""
    yield from _hidden(machine, present_gpus() if present is None else present)
    yield from _divided(ask)
    if len(machine.gpus) < 2:
        return
    yield _ranks(machine.gpus)
    pairs = [*combinations(sorted(gpu.number for gpu in machine.gpus), 2)]
    links = machine.links if machine.links != GpuLinks() else gpu_links(ask)
    yield from _links(pairs, links.ways)
    yield from _peers(pairs, links.peers)


def _hidden(machine: Machine, present: tuple[Gpu, ...]) -> Iterator[Finding]:
    usable, chosen = {gpu.number for gpu in machine.gpus}, visible_gpus()
    others = [f"GPU {gpu.number} ({gpu.name})" for gpu in present if gpu.number not in usable]
    if chosen is None:
        return
    order = ", ".join(str(gpu.number) for gpu in machine.gpus) or "none"
    hidden = f"; hidden: {', '.join(others)}" if others else ""
    yield Finding("CUDA_VISIBLE_DEVICES", f"{chosen}: GPUs {order}, in the order of ranks{hidden}")


def _divided(ask: Ask) -> Iterator[Finding]:
    """GPUs in MIG mode: nvidia-smi shows the whole GPU, and CUDA an instance of it."""
    rows = [line.split(",") for line in ask(_DIVIDED, "--format=csv,noheader").splitlines()]
    numbers = [row[0].strip() for row in rows if len(row) == 2 and row[1].strip() == "Enabled"]
    if numbers:
        fix = "plans count the whole GPU, and CUDA gives an instance of it; ranks need whole GPUs"
        value = f"GPU {', '.join(numbers)} may be divided into instances"
        yield Finding("MIG", value, fix, f"sudo nvidia-smi -i {','.join(numbers)} -mig 0")


def _ranks(gpus: tuple[Gpu, ...]) -> Finding:
    equal = most_equal(gpus)
    numbers = [str(ranks) for ranks in (2, 4, 8) if ranks <= len(equal)]
    if not numbers:
        names = ", ".join(dict.fromkeys(gpu.name for gpu in gpus))
        return Finding("ranks", f"none: a model is divided among equal GPUs, and these are {names}")
    return Finding("ranks", f"--tp {' or '.join(numbers)}: {len(equal)} GPUs are equal ({equal[0].name})")


def _links(pairs: list[Pair], words: Mapping[Pair, str]) -> Iterator[Finding]:
    by_way: dict[str, list[str]] = {}
    for one, other in pairs:
        if word := words.get((one, other)):
            by_way.setdefault(_way(word), []).append(f"{one}-{other}")
    for way, linked in by_way.items():
        yield Finding("GPU links", f"{', '.join(linked)}: {way}")


def _way(word: str) -> str:
    links = re.fullmatch(r"NV(\d+)", word)
    return f"NVLink, {links[1]} links" if links else WAYS.get(word, word)


def _peers(pairs: list[Pair], words: Mapping[Pair, str]) -> Iterator[Finding]:
    """Findings on GPUs that write into each other's memory. Where they cannot, a slower way is used."""
    states = {pair: words[pair] for pair in pairs if pair in words}
    lacking = {pair: state for pair, state in states.items() if state != "OK"}
    if not states:
        return
    if not lacking:
        yield Finding("GPU peers", "all; a start of ranks tries them")
        return
    names = ", ".join(f"{one}-{other}" for one, other in lacking)
    why = ", ".join(dict.fromkeys(PEER_STATES.get(state, state) for state in lacking.values()))
    yield Finding("GPU peers", f"not {names} ({why}): ranks sum through CPU memory, which takes about twice as long")
