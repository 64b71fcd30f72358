"""Tandem beside the engines that are installed, on one model, in turns: one table. `make bench-peers` runs it.

    PYTHONPATH=src python benchmarks/peers/compare.py        # the demo model, as a GGUF file of Q8_0
    PYTHONPATH=src python benchmarks/peers/compare.py --directory M --file M.gguf

Tokens per second of one prompt and of one answer after it, the median of the rounds. llama.cpp and Tandem read the
same file; vLLM, SGLang and KTransformers read the directory. $PEER_LLAMA_CPP is an interpreter that has
llama-cpp-python, for one that lies in another environment; $PEER_NODE the folder of an `npm install node-llama-cpp`,
which brings llama.cpp built. An engine that is missing is named, with what installs it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
sys.path += [*(str(SUPPORT / each) for each in ("", "foreign", "gguf_models")), str(ROOT / "src")]

from peers import PEERS, Missing, Rates, Wish  # noqa: E402
from tandem.bench.rows import keep, machine_name, stamp  # noqa: E402
from tandem.errors import TandemError  # noqa: E402
from tandem.machine.machine import Machine  # noqa: E402

OURS = "kt"


def in_turns(names: list[str], wish: Wish, rounds: int) -> tuple[dict[str, list[Rates]], dict[str, str]]:
    """Rates of each engine, a round after the other; and why some have none."""
    found: dict[str, list[Rates]] = {name: [] for name in names}
    missing = dict[str, str]()
    for number in range(rounds):
        for name in [name for name in names if name not in missing]:
            try:
                found[name].append(PEERS[name](wish))
                print(f"round {number + 1}: {name} {found[name][-1]}", file=sys.stderr, flush=True)
            except (Missing, TandemError) as error:
                missing[name] = str(error)
    return {name: rates for name, rates in found.items() if rates}, missing


def rows(found: dict[str, list[Rates]], wish: Wish, said: dict[str, Any]) -> list[dict[str, Any]]:
    """One for each engine. `ratio`: Tandem's rates divided by its."""
    median = {
        name: [statistics.median(getattr(each, what) for each in rates) for what in ("prompt", "answer")]
        for name, rates in found.items()
    }
    ours = median.get(OURS)
    return [
        {
            "bench": "peers", "peer": name, "version": found[name][0].version, "model": wish.file.name,
            "prompt_tokens": wish.prompt_tokens, "new_tokens": wish.new_tokens, "threads": wish.threads,
            "rounds": len(found[name]), "prompt_tok_s": round(prompt, 1), "tok_s": round(answer, 2),
            "ratio": None if ours is None else [round(ours[0] / prompt, 2), round(ours[1] / answer, 2)],
        } | said
        for name, (prompt, answer) in median.items()
    ]  # fmt: skip


def table(made: list[dict[str, Any]], missing: dict[str, str]) -> str:
    lines = [
        "| engine | version | prompt, tokens/s | answer, tokens/s | kt ÷ it: prompt, answer |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in made:
        ratio = ", ".join(f"{each:.2f} ×" for each in row["ratio"] or ())
        lines.append(f"| {row['peer']} | {row['version']} | {row['prompt_tok_s']} | {row['tok_s']} | {ratio} |")
    return "\n".join([*lines, *(f"{name} is missing: {why}" for name, why in missing.items())])


def demo(folder: Path, kind: str) -> tuple[Path, Path]:
    """The demo model's directory, and a GGUF file of it: experts of `kind`, the rest bf16."""
    from gguf_files import Kind, write_gguf
    from tandem.checkpoint import demo_dir
    from tandem.engine.start.demo_model import prepare_demo

    def choose(name: str, array: Any) -> Kind:
        if "_exps" in name:
            return Kind[kind]
        return Kind.F32 if array.ndim == 1 or "_inp" in name else Kind.BF16

    directory = prepare_demo(demo_dir())
    return directory, write_gguf(directory, folder / f"demo-{kind}.gguf", choose, pre="smollm")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="the model for engines that read no GGUF; default: the demo")
    parser.add_argument("--file", type=Path, help="the same as GGUF")
    parser.add_argument("--type", default="Q8_0", help="of the demo's experts in its GGUF file")
    parser.add_argument("--peer", action="append", choices=list(PEERS), help="only these, and Tandem")
    parser.add_argument("--prompt", type=int, default=256, metavar="TOKENS")
    parser.add_argument("--new", type=int, default=64, metavar="TOKENS")
    parser.add_argument("--threads", type=int, default=len(Machine.detect().cores))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="of results, to add the rows to")
    asked = parser.parse_args()
    if (asked.directory is None) != (asked.file is None):
        parser.error("give --directory and --file together")
    with tempfile.TemporaryDirectory(prefix="tandem-peers-") as scratch:
        directory, file = (asked.directory, asked.file) if asked.file else demo(Path(scratch), asked.type)
        wish = Wish(file, directory, asked.prompt, asked.new, asked.threads)
        names = [OURS, *(name for name in PEERS if name != OURS and name in (asked.peer or PEERS))]
        found, missing = in_turns(names, wish, asked.rounds)
    made = rows(found, wish, stamp(machine_name(Machine.detect())))
    print(table(made, missing))
    for row in made:
        print(json.dumps(row), file=sys.stderr)
    if asked.keep and made:
        keep(made, asked.keep)
    return 0


if __name__ == "__main__":
    sys.exit(main())
