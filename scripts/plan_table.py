"""docs/plans.md: what `kt plan` says of 12 models on six machines that people have, and what came of predictions.

    python scripts/plan_table.py --write
    python scripts/plan_table.py --check   # exit code 1 where the page says something else

Each machine is as its line says, and measured rows are those of benchmarks/results. So the page is the same wherever it
is made.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from tandem.bench.architectures import named_subject  # noqa: E402
from tandem.errors import ConfigError  # noqa: E402
from tandem.flags.engine_config import EngineConfig  # noqa: E402
from tandem.machine.machine import Core, Machine  # noqa: E402
from tandem.planner.forecast.advice import PlanQuestion  # noqa: E402
from tandem.planner.forecast.machine_spec import MachineWish, wished_machine, wished_speeds  # noqa: E402
from tandem.planner.forecast.prediction import Range  # noqa: E402
from tandem.planner.forecast.report import Report, report  # noqa: E402
from tandem.planner.ways import way_of, with_way  # noqa: E402

PAGE = ROOT / "docs" / "plans.md"
ROWS = "nvidia-h100-80gb-hbm3-intel-xeon-processor-16-threads/plan.json"  # of benchmarks/plan_measured.py
MODELS = (
    "qwen3-30b-a3b", "qwen3-235b-a22b", "qwen3-next-80b", "glm-4.5-air", "glm-4.6", "glm-5", "gpt-oss-20b",
    "gpt-oss-120b", "mixtral-8x7b", "deepseek-v3", "deepseek-v4-flash", "kimi-k2",
)  # fmt: skip
MACHINES = {
    "laptop": MachineWish("none", "32GB", "60GB/s", 8, "avx2"),
    "desktop, 4090": MachineWish("4090", "64GB", "75GB/s", 16, "avx512_bf16", "25GB/s"),
    "desktop, 5090": MachineWish("5090", "192GB", "85GB/s", 16, "avx512_bf16", "50GB/s"),
    "workstation, 4090": MachineWish("4090", "256GB", "250GB/s", 32, "avx512_bf16", "25GB/s"),
    "server, no GPU": MachineWish("none", "768GB", "350GB/s", 64, "amx"),
    "server, H100": MachineWish("h100", "1TB", "350GB/s", 56, "amx", "55GB/s"),
}
GAMER, RIG = "avx512_bf16", ("85GB/s", 16)
QUESTIONS: dict[str, tuple[MachineWish, str, str, dict[str, str]]] = {
    "an RTX 4090 with 64 GB": (
        MachineWish("4090", "64GB", *RIG, GAMER, "25GB/s"), "openai/gpt-oss-120b", "gpt-oss-120b", {},
    ),
    "an RTX 4090 with 128 GB": (
        MachineWish("4090", "128GB", *RIG, GAMER, "25GB/s"), "zai-org/GLM-4.5-Air-FP8", "glm-4.5-air-fp8",
        {"kt_method": "INT4"},
    ),
    "an RTX 4090 with 512 GB": (
        MachineWish("4090", "512GB", "250GB/s", 32, GAMER, "25GB/s"), "deepseek-ai/DeepSeek-V3", "deepseek-v3",
        {"kt_method": "INT4"},
    ),
    "two RTX 3090 with 128 GB": (
        MachineWish("2x3090", "128GB", "50GB/s", 16, "avx2", "25GB/s"), "Qwen/Qwen3-Next-80B-A3B-Instruct",
        "qwen3-next-80b", {"kt_method": "INT4"},
    ),
    "an RTX 5090 with 96 GB": (
        MachineWish("5090", "96GB", *RIG, GAMER, "50GB/s"), "openai/gpt-oss-120b", "gpt-oss-120b", {},
    ),
    "a card of 12 GB with 64 GB": (
        MachineWish("4070", "64GB", "75GB/s", 8, GAMER, "25GB/s"), "Qwen/Qwen3.5-35B-A3B", "qwen3.5-35b-a3b",
        {"kt_method": "INT4"},
    ),
    "a laptop of 32 GB without a GPU": (
        MachineWish("none", "32GB", "60GB/s", 8, "avx2"), "Qwen/Qwen3.5-35B-A3B", "qwen3.5-35b-a3b",
        {"kt_method": "INT4"},
    ),
    "a laptop of 32 GB with a GPU of 8 GB": (
        MachineWish("8GB@250GB/s", "32GB", "60GB/s", 8, "avx2", "12GB/s"), "Qwen/Qwen3.5-35B-A3B", "qwen3.5-35b-a3b",
        {"kt_method": "INT4"},
    ),
    "1 TB of RAM and no GPU": (
        MachineWish("none", "1TB", "350GB/s", 64, "amx"), "deepseek-ai/DeepSeek-V3", "deepseek-v3", {},
    ),
}  # fmt: skip
"""Questions of people: the machine, the model's name on the hub, its architecture's name, and flags."""
METHODS = (None, "INT4")  # what is lossless first
TOKENS = 8192  # of the KV cache
FLAGS = {"mem_fraction_static": 0.95, "max_total_tokens": TOKENS}
ANYTHING = Machine("none", (Core(0, 0, 0),), ("scalar",), 1 << 30, 1 << 30)  # every part of it is replaced

HEAD = """# Plans

What `kt plan` says of 12 models on six machines. None of these figures is measured; some others are,
[below](#predicted-and-measured). `kt plan MODEL --verify` measures yours. `python scripts/plan_table.py --write` makes
this page.
"""
TWELVE = f"""## Twelve models on six machines

Two tables have tokens per second: of one answer at 1,024 tokens, and of a prompt of 2,048. Experts are as the model's
first release stores them: bf16 for Qwen, GLM-4.5-Air and GLM-4.6. Their FP8 releases need half of the bytes: see
[each model's page](models/README.md).

| a cell | meaning |
| --- | --- |
| 20–27 | between 20 and 27 tokens per second |
| INT4: 12–17 | the model fits only with `--kt-method INT4`, which is lossy |
| needs 72 GiB | the model does not fit; with INT4 and so much RAM it would |

Every line has `--mem-fraction-static {FLAGS["mem_fraction_static"]} --max-total-tokens {TOKENS}`.
"""


def question(name: str, wish: MachineWish, method: str | None) -> PlanQuestion:
    model, stored = named_subject(name)
    machine = wished_machine(wish, ANYTHING)
    flags = FLAGS if method is None else {**FLAGS, "kt_method": method}
    config = EngineConfig.from_keywords(name, **flags)
    return PlanQuestion(config, model, machine, stored, wished_speeds(wish, machine, None))


def cells(name: str, place: str) -> tuple[str, str]:
    """The cells for decoding and for a prompt: the first method that fits, and its range."""
    for method in METHODS:
        asked = question(name, MACHINES[place], method)
        try:
            found = asked.predicted(asked.plan())
        except ConfigError:
            continue
        lossy = "" if method is None else "INT4: "
        return f"{lossy}{shown(found.decode[1])}", f"{lossy}{shown(found.prompt)}"
    return f"needs {needed(report(name, asked))}", "–"


def shown(found: Range) -> str:
    return f"{short(found.low)}–{short(found.high)}"


def short(value: float) -> str:
    """Two digits, or all before the point."""
    return f"{value:.2g}" if value < 9.95 else f"{float(f'{value:.2g}'):.0f}"


def needed(found: Report) -> str:
    """Memory that it would take, of all ways to make it fit."""
    memory = [way.change for way in found.to_fit if way.change.endswith("of RAM")]
    return memory[-1].replace(".0 GiB of RAM", " GiB") if memory else found.reasons[0].partition(";")[0]


def lines(name: str) -> tuple[str, ...]:
    """A model's lines of both tables."""
    columns = zip(*(cells(name, place) for place in MACHINES), strict=True)
    return tuple(f"| {name} | " + " | ".join(column) + " |" for column in columns)


def machine_line(name: str, wish: MachineWish) -> str:
    gpu = "none" if wish.gpus == "none" else f"{wish.gpus}, {wish.pcie}"
    return f"| {name} | {gpu} | {wish.ram}, {wish.bandwidth} | {wish.cores} cores, {wish.isa} |"


def page() -> str:
    machines = ["| machine | GPU, bus | RAM | CPU |", "| --- | --- | --- | --- |"]
    machines += [machine_line(name, wish) for name, wish in MACHINES.items()]
    decode, prompt = ("\n".join(rows) for rows in zip(*map(lines, MODELS), strict=True))
    return "\n".join([
        HEAD, *questions(), *machines, "", *heading("of one answer"), decode, "", *heading("of a prompt"), prompt, "",
        answer(), measured(kept_rows()),
    ])  # fmt: skip


def questions() -> list[str]:
    """The lines that people with some machine paste, and what comes of them."""
    head = "| machine | paste | answer, tokens/s | prompt, tokens/s | context, tokens | given up for room |"
    asked = ["## What runs on …", "", head]
    rows = [question_line(name) for name in QUESTIONS]
    how = (
        "These plans are `kt serve`'s own: no flag about memory is "
        "needed. The last column is what the plan gives up so that the GPU is used and a context of 16,384 tokens "
        "fits ([what each means](commands.md#what-is-given-up-for-room))."
    )
    end = ["", *textwrap.wrap(how, 118), "", TWELVE]
    return [*asked, "| --- | --- | --: | --: | --: | --- |", *rows, *end]


def question_of(name: str) -> PlanQuestion:
    """With as many GPUs as the server takes."""
    wish, _, architecture, flags = QUESTIONS[name]
    model, stored = named_subject(architecture)
    machine = wished_machine(wish, ANYTHING)
    config = EngineConfig.from_keywords(architecture, **flags)
    asked = PlanQuestion(config, model, machine, stored, wished_speeds(wish, machine, None))
    return with_way(asked)[0]


def command(name: str) -> str:
    _, hub_name, _, flags = QUESTIONS[name]
    given = (f"--{flag.replace('_', '-')} {value}" for flag, value in flags.items())
    return " ".join(["kt serve", hub_name, *given])


def question_line(name: str) -> str:
    asked = question_of(name)
    plan = asked.plan()
    found = asked.predicted(plan)
    given = next((each.value for each in plan.decisions if each.name == "made to fit"), "nothing")
    rates = f"{shown(found.decode[1])} | {shown(found.prompt)} | {plan.context_length:,}"
    chosen = way_of(asked.config)
    machine = f"{name} (`{chosen.flag}` is chosen)" if chosen.gpus > 1 else name
    return f"| {machine} | `{command(name)}` | {rates} | {given} |"


def heading(what: str) -> list[str]:
    return [
        f"| tokens per second {what} | " + " | ".join(MACHINES) + " |",
        "| --- " * (len(MACHINES) + 1) + "|",
    ]


def answer() -> str:
    """Answer to a question that many ask."""
    asked = question("deepseek-v3", MACHINES["workstation, 4090"], None)
    found = report("deepseek-v3", asked)
    ways = "\n".join(f"- {way.change}: {way.brings}{' (lossy)' if way.lossy else ''}" for way in found.to_fit)
    return f"""## Is 256 GB and a 4090 enough for DeepSeek-V3?

{"Yes." if found.fits else "No."} `kt plan deepseek-ai/DeepSeek-V3 --gpu 4090 --ram 256GB` says why, line by line. It
would fit with:

{ways}
"""


def kept_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(
        (ROOT / "benchmarks" / "results" / ROWS).read_text(encoding="utf-8")
    )
    return rows


def measured(rows: list[dict[str, Any]]) -> str:
    """Predictions beside what they were predictions of; rows: in pairs, decoding and prompt."""
    held = sum(row["predicted_low"] <= row["measured"] <= row["predicted_high"] for row in rows)
    lines = [measured_line(*pair) for pair in zip(rows[::2], rows[1::2], strict=True)]
    return f"""## Predicted and measured

`python benchmarks/plan_measured.py --out benchmarks/results` made these rows on an H100 with 16 threads of a Xeon that
others share. Ranges are as wide as `kt plan`'s. They stand on the machine's own speeds, which were read in the same
minute; nothing in them comes from a model's times. {held} of {len(rows)} figures lie in their ranges. † marks the
others.

| model | experts | on the GPU | decoding: predicted | measured | prompt of 2048: predicted | measured |
| --- | --- | --- | --- | --- | --- | --- |
{chr(10).join(lines)}
"""


def measured_line(decode: dict[str, Any], prompt: dict[str, Any]) -> str:
    ranges = [f"{short(row['predicted_low'])}–{short(row['predicted_high'])}" for row in (decode, prompt)]
    cells = [f"{said} | {beside(row)}" for said, row in zip(ranges, (decode, prompt), strict=True)]
    return f"| {decode['config']} | {decode['method']} | {decode['gpu_share']:.0%} | {' | '.join(cells)} |"


def beside(row: dict[str, Any]) -> str:
    holds = row["predicted_low"] <= row["measured"] <= row["predicted_high"]
    return short(row["measured"]) + ("" if holds else " †")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--check", action="store_true")
    asked.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        print("docs/plans.md is not what kt plan says: run with --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
