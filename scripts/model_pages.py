"""docs/models/: a page for each headline model, from scripts/headline_models.toml and what `kt plan` says.

    python scripts/model_pages.py --write
    python scripts/model_pages.py --check   # exit code 1 where a page says something else

Machines are as the table says, so a page is the same wherever it is made.
"""

from __future__ import annotations

import argparse
import copy
import json
import shlex
import sys
import tempfile
import textwrap
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "benchmarks"), str(ROOT / "src")]

from plan_table import ANYTHING, shown  # noqa: E402

from hub_models import HUB  # noqa: E402
from tandem.bench.architectures import named_keys  # noqa: E402
from tandem.engine.start.planning import model_as_stored, stored_at  # noqa: E402
from tandem.flags.engine_config import EngineConfig  # noqa: E402
from tandem.planner.forecast.advice import PlanQuestion, ways_to_go_faster  # noqa: E402
from tandem.planner.forecast.ledger import RAM, VRAM  # noqa: E402
from tandem.planner.forecast.machine_spec import MachineWish, wished_machine, wished_speeds  # noqa: E402
from tandem.planner.memory import gib  # noqa: E402
from tandem.planner.plan import Plan  # noqa: E402

TABLE = Path(__file__).with_suffix("").with_name("headline_models.toml")
PAGES = ROOT / "docs" / "models"
FLAGS = {
    "gpus": "--gpu", "ram": "--ram", "bandwidth": "--bandwidth", "cores": "--cpu", "isa": "--isa", "pcie": "--pcie",
}  # fmt: skip
WIDTH = 118
WEIGHTS = ("weights", "dense weights", "experts", "tables")  # lines of a ledger


@dataclass(frozen=True)
class Place:
    """A machine of the table, and the flags of `kt serve` that a model needs there."""

    name: str
    wish: MachineWish
    flags: str = ""

    @property
    def plan_flags(self) -> str:
        """The machine, in the words of `kt plan`."""
        given = ((flag, getattr(self.wish, name)) for name, flag in FLAGS.items())
        return " ".join(f"{flag} {value}" for flag, value in given if value is not None)


@dataclass(frozen=True)
class Headline:
    """A model of the table. text_keys: those of its `text_config`."""

    name: str
    title: str
    intro: str
    sizes: str
    files: tuple[tuple[str, str], ...]
    places: tuple[Place, ...]
    change: tuple[str, ...]
    traps: tuple[str, ...]
    draft: str = ""
    hub: bool = False
    keys: dict[str, Any] = field(default_factory=dict)
    text_keys: dict[str, Any] = field(default_factory=dict)

    @property
    def hub_name(self) -> str:
        return self.files[0][0]

    def config_json(self) -> dict[str, Any]:
        """The hub's first file, as far as plans read it."""
        known: dict[str, Any] = HUB[self.sizes].config if self.hub else named_keys(self.sizes, None)
        config = copy.deepcopy(known) | self.keys
        if self.text_keys:
            config["text_config"] |= self.text_keys
        return config

    def serve_line(self, place: Place) -> str:
        return f"kt serve {self.hub_name} {place.flags}".rstrip()

    def plan_line(self, place: Place) -> str:
        return f"kt plan {self.hub_name} {place.flags}".rstrip() + f" \\\n        {place.plan_flags}"


def headlines() -> dict[str, Headline]:
    """The table, by page."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    machines = table["machines"]
    return {name: _headline(name, dict(entry), machines) for name, entry in table["models"].items()}


def _headline(name: str, entry: dict[str, Any], machines: dict[str, Any]) -> Headline:
    places = tuple(_place(machines[machine], *flags) for machine, *flags in entry.pop("on"))
    files = tuple((file, stored) for file, stored in entry.pop("files"))
    change, traps = tuple(entry.pop("change")), tuple(entry.pop("traps"))
    return Headline(name=name, files=files, places=places, change=change, traps=traps, **entry)


def _place(machine: dict[str, Any], flags: str = "") -> Place:
    wish = {key: value for key, value in machine.items() if key != "name"}
    return Place(machine["name"], MachineWish(**wish), flags)


def question(model: Headline, place: Place) -> PlanQuestion:
    """The question that `kt plan` asks, from config.json alone."""
    with tempfile.TemporaryDirectory(prefix="tandem-page-") as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps(model.config_json()), encoding="utf-8")
        config = EngineConfig.from_args([folder, *shlex.split(place.flags)])
        sizes = model_as_stored(path, config)
        stored = stored_at(path, sizes, None)
    machine = wished_machine(place.wish, ANYTHING)
    return PlanQuestion(config, sizes, machine, stored, wished_speeds(place.wish, machine, None))


def row(model: Headline, place: Place) -> str:
    """A row of the table of machines. Raises ConfigError where the model does not fit."""
    asked = question(model, place)
    plan = asked.plan()
    found = asked.predicted(plan)
    flags = f"`{place.flags}`" if place.flags else "none"
    speeds = f"{shown(found.decode[1])} | {shown(found.prompt)} | {plan.context_length:,}"
    return f"| {place.name} | {flags} | {speeds} | {memory(plan)} | {given_up(plan)} |"


def memory(plan: Plan) -> str:
    taken = {ledger.place: gib(ledger.total_bytes) for ledger in plan.ledgers}
    return " + ".join(taken[place] for place in (RAM, VRAM) if place in taken)


def disk_gb(model: Headline) -> int:
    """Gigabytes of the first file, in tens: its weights as they are packed, which is nearly what is stored."""
    roomy = Place("any", replace(model.places[0].wish, gpus="none", ram="8TB"))
    entries = [entry for ledger in question(model, roomy).plan().ledgers for entry in ledger.entries]
    return round(sum(entry.nbytes for entry in entries if entry.name in WEIGHTS) / 1e10) * 10


def given_up(plan: Plan) -> str:
    return next((each.value for each in plan.decisions if each.name == "made to fit"), "nothing")


def page(model: Headline) -> str:
    first = model.places[0]
    blocks = [
        f"# {model.title}", filled(model.intro),
        filled(f"A machine that does: {first.name} of RAM. {INSTALL}"),
        f"    {model.serve_line(first)}", filled(first_start(model)), CHAT,
        "## What to expect", HEAD, machines(model), ASK,
        f"    {model.plan_line(first)}",
        "## Which file", files(model),
        "## What to change", bullets([*faster(model), *model.change, *common(model)]),
        "## Known traps", bullets(model.traps), END,
    ]  # fmt: skip
    return "\n\n".join(blocks) + "\n"


def first_start(model: Headline) -> str:
    """Steps before the first answer."""
    rounds = f" {ROUNDS}" if "INT4" in model.places[0].flags else ""
    size = disk_gb(model)
    return f"It needs about {size} GB of disk. After the download it packs the weights for some minutes.{rounds}"


def machines(model: Headline) -> str:
    head = [
        "| machine | flags | one answer | a prompt | context | memory, CPU + GPU | given up for room |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*head, *(row(model, place) for place in model.places)])


HEAD = textwrap.fill(
    "`kt plan` says this; nothing in the table is measured. Speeds are tokens per second, as ranges: of one answer at "
    "1,024 tokens, and of a prompt of 2,048. The context is what one request may have. The last column says what "
    "`kt serve` gives up by itself ([why](../commands.md#what-is-given-up-for-room)). A desktop here has 75 to 85 GB/s "
    "of RAM and a CPU with AVX-512 (Ryzen 7000, 9000). Half of that bandwidth is about half of an answer's speed.",
    WIDTH,
)
INSTALL = "[Install `kt`](../setup-gpu.md) first. This line downloads the model, if it fits, and serves it:"
CHAT = textwrap.fill(
    "When it prints its address, run `kt chat` in another terminal, after `source .venv/bin/activate` there. Or open "
    "http://127.0.0.1:30000/ in a browser. `kt chat` prints the speed of each answer.",
    WIDTH,
)
ROUNDS = "`--kt-method INT4` rounds the experts meanwhile, which [costs accuracy](../quality.md#what-rounding-costs)."
ASK = "Describe your machine, or leave those flags out where it is this one. Nothing is downloaded for it:"
END = textwrap.fill(
    "More: [tuning](../tuning.md), [which quantisation](../quantisation.md), [messages](../troubleshooting.md). "
    "`python scripts/model_pages.py --write` made this page.",
    WIDTH,
)


def files(model: Headline) -> str:
    rows = [f"| `{name}` | {stored} |" for name, stored in model.files]
    gguf = "| any GGUF file of it: `kt serve FILE.gguf` | [which blocks](../formats.md#gguf) |"
    return "\n".join(["| name on the hub | stored as |", "| --- | --- |", *rows, gguf])


def faster(model: Headline) -> list[str]:
    """The advice of `kt plan` for the first machine, a line each."""
    place = model.places[0]
    asked = question(model, place)
    ways = ways_to_go_faster(asked, asked.plan())
    return [f"`{way.change}`{' (lossy)' if way.lossy else ''}: {way.brings}, by the plan." for way in ways]


def common(model: Headline) -> list[str]:
    draft = (
        f"`--speculative-algorithm {model.draft}`: the checkpoint's draft layer drafts tokens. It takes memory, too. "
        "With most experts in RAM it gains little ([when it pays](../speculation.md))."
    )
    return [
        *([draft] if model.draft else []),
        "`--context-length N`: a longer context takes memory from experts on the GPU.",
        "`--packed-cache DIR`: the second start maps what the first one packed ([loading](../loading.md)). It takes as "
        "much disk as the packed weights, and the download stays.",
    ]


def bullets(texts: list[str] | tuple[str, ...]) -> str:
    return "\n".join(textwrap.fill(text, WIDTH, initial_indent="* ", subsequent_indent="  ",
                                   break_long_words=False, break_on_hyphens=False) for text in texts)  # fmt: skip


def filled(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def index(models: dict[str, Headline]) -> str:
    """The page that lists the others."""
    lines = [
        f"| [{model.title}]({name}.md) | {model.places[0].name} | `{model.serve_line(model.places[0])}` |"
        for name, model in models.items()
    ]
    head = filled(
        "Models that people ask for, each with a page: machine, file, command, speed to expect, traps. Others run, "
        "too: [all types](../models.md). For your machine ask `kt plan MODEL`; [plans](../plans.md) has more machines."
    )
    table = ["| model | a machine that does | line |", "| --- | --- | --- |", *lines]
    return "\n\n".join(["# Headline models", head, "\n".join(table)]) + "\n"


def pages() -> dict[Path, str]:
    models = headlines()
    return {PAGES / "README.md": index(models)} | {
        PAGES / f"{name}.md": page(model) for name, model in models.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--check", action="store_true")
    asked.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        PAGES.mkdir(exist_ok=True)
        for path, text in pages().items():
            path.write_text(text, encoding="utf-8")
        return 0
    wrong = [path.name for path, text in pages().items() if path.read_text(encoding="utf-8") != text]
    if wrong:
        print(
            f"docs/models/ is not what kt plan says ({', '.join(wrong)}): run with --write", file=sys.stderr
        )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
