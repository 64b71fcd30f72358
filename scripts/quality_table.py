"""The table of docs/quality.md: what each format and mode costs the demo model.

    python scripts/quality_table.py --measure benchmarks/results       # half an hour on two cores; 3 GB of /tmp
    python scripts/quality_table.py --write                            # the table, from those rows
    python scripts/quality_table.py --check                            # exit code 1 where the page says something else

Only routed experts are rounded, each to the nearest code. GGUF's types are rounded by llama.cpp's own code: `--ggml
libggml-base.so`, which llama-cpp-python has. Kernels multiply their codes as they are, exactly and with int8
activations. Blocks have 256 weights, most of them, and the demo model's rows 576 or 192: each row ends with a part of a
block, which no file could say. `--only NAME` measures this row, and keeps the others.
A KV cache in fp8 is measured where a GPU since Ada is; without one its rounding alone, in the CPU's cache.
The reference's logits are computed once. Rows are kept as soon as they are measured, also those before Ctrl+C.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
SUPPORT = ROOT / "tests" / "support"
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts"), str(SUPPORT), str(SUPPORT / "foreign")]

from tandem.bench.rows import keep, machine_name, progress, stamp  # noqa: E402
from tandem.planner.forecast.quantisations import INT8_ACTIVATIONS as A8  # noqa: E402
from tandem.planner.forecast.quantisations import KNOWN_FILE as DEMO_FILE  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

    from tandem.quality.compare import CandidateResult
    from tandem.quality.saved_logits import SavedLogits
    from tandem.quality.stream import LayerStream, Variant
    from tandem.quality.text import Windows

PAGE, RESULTS = ROOT / "docs" / "quality.md", ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- formats: scripts/quality_table.py writes this -->", "<!-- /formats -->"
TOKENS, WINDOW = 2048, 512
CACHE_ROUNDED = "KV cache in fp8, its rounding alone"
UNROUNDED = "nothing rounded, another kernel tier"
ADA = (8, 9)
ROUNDED = "`--kt-int8-activations`"
DEFERRED = "2 late experts"  # as results have it
SHOWN = {DEFERRED: "2 deferred experts"}
# name in the table: (bits per weight with its scales, key of stored_formats.MAKERS)
STORED = {
    "fp8, a scale per row": (8.0, "fp8 per channel"), "fp8, blocks of 64 × 64": (8.0, "fp8 blocks of 64"),
    "mxfp8": (8.25, "mxfp8"), "mxfp4": (4.25, "mxfp4 packed"), "nvfp4": (4.5, "nvfp4 packed"),
}  # fmt: skip
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Experiment:
    """A row of the table. variant: writes its files, if it has some. change: what is done to its stream."""

    name: str
    bits: float  # per weight
    variant: Callable[[], Variant]
    change: Callable[[LayerStream], None] = lambda _: None


def experiments(demo: Path, folder: Path, ggml: Path | None) -> Iterator[Experiment]:
    """Every row, in turn; those of GGUF's types with a library alone."""
    from tandem.quality.stream import Variant

    yield Experiment(UNROUNDED, 16.0, lambda: Variant(demo, tier=_other_tier()))
    yield Experiment(DEFERRED, 16.0, lambda: Variant(demo, deferred=2))
    for method, bits in (("INT8", 8.5), ("INT4", 4.5)):
        yield Experiment(f"`--kt-method {method}`", bits, lambda method=method: Variant(demo, method))
        yield Experiment(
            f"`--kt-method {method} --kt-int8-activations`",
            bits,
            lambda method=method: Variant(demo, method, int8_activations=True),
        )
    for name, (bits, stored) in STORED.items():
        yield Experiment(name, bits, lambda stored=stored: Variant(_stored(demo, folder, stored)))
    if _gpu_since_ada():
        yield Experiment("KV cache in fp8", 16.0, lambda: Variant(demo, gpu_share=0.0, cached="fp8_e4m3"))
    else:
        yield Experiment(CACHE_ROUNDED, 16.0, lambda: Variant(demo), round_cache)
    if ggml is not None:
        yield from _gguf_types(demo, ggml)


def _gguf_types(demo: Path, library: Path) -> Iterator[Experiment]:
    """Each type that is read, exactly and with int8 activations. Its codes are in memory until the next one. Shared
    experts are no routed ones here: they would be rounded, too."""
    from ggml_rounding import Ggml, Rounding

    from tandem.formats.gguf_blocks import GGUF_CODES
    from tandem.quality.stream import Variant

    ggml, unrounded = Ggml(library), Variant(demo, disable_shared_experts_fusion=True)
    for name in GGUF_CODES:
        rounding, bits = Rounding(ggml, name), int(100 * ggml.bits(name) + 0.5) / 100
        for label, int8 in ((name, False), (f"{name} {ROUNDED}", True)):
            change = partial(rounding.apply, int8_activations=int8)
            yield Experiment(f"GGUF {label}", bits, lambda: unrounded, change)


def round_cache(stream: LayerStream) -> None:
    """Keys and values are stored as a cache in fp8 would have them: without scales, and 448 at most."""
    import torch

    store, most = stream.ops.rope_store, torch.finfo(torch.float8_e4m3fn).max

    def rounded(*given: Any, **named: Any) -> Tensor:
        queries = store(*given, **named)
        for pages in given[3:5]:
            pages.copy_(pages.clamp(-most, most).to(torch.float8_e4m3fn))
        return queries

    vars(stream.ops)["rope_store"] = rounded


def _other_tier() -> str:
    """One below the widest: its sums are in another order."""
    from tandem._core import supported_tiers

    tiers: list[str] = supported_tiers()
    return tiers[-2] if len(tiers) > 1 else tiers[-1]


def _stored(demo: Path, folder: Path, stored: str) -> Path:
    from quantised_models import save_experts

    return save_experts(demo, folder / stored.replace(" ", "-"), stored)


def _gpu_since_ada() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= ADA


def measured(ggml: Path | None, only: Collection[str]) -> Iterator[Row]:
    """One after the other, against the same logits. only: names of rows; empty: all."""
    from tandem.checkpoint import demo_dir
    from tandem.engine.start.demo_model import prepare_demo
    from tandem.machine.machine import Machine

    demo = prepare_demo(demo_dir())
    windows = text_windows(demo)
    said = stamp(machine_name(Machine.detect()))
    with tempfile.TemporaryDirectory(prefix="tandem-quality-") as folder:
        logits = save_logits(demo, windows, Path(folder) / "logits.safetensors")
        written = Path(folder) / "written"
        for experiment in experiments(demo, written, ggml):
            if only and experiment.name not in only:
                continue
            written.mkdir()
            row = compared(experiment, windows, logits) | said
            print(json.dumps(row), file=sys.stderr, flush=True)
            yield row
            shutil.rmtree(written)


def text_windows(demo: Path) -> Windows:
    """Tandem's own text, as all rows of the table read it."""
    from tandem.quality import text
    from tandem.text.tokenizer import Tokenizer

    return text.cut(Tokenizer.load(demo), text.default_text(), WINDOW, TOKENS)


def save_logits(demo: Path, windows: Windows, file: Path) -> SavedLogits:
    """All of the reference's: 0.4 GB."""
    from tandem.quality.compare import Candidate, Comparison
    from tandem.quality.saved_logits import Origin, SavedLogits, writing
    from tandem.quality.stream import LayerStream, Variant

    reference = LayerStream(Variant(demo), windows)
    vocab = reference.config.vocab
    origin = Origin("demo", windows.digest, len(windows.predicting), vocab, vocab)
    with writing(file, origin) as writer:
        Comparison(windows, reference, list[Candidate](), progress=_tenths("reference")).run(writer)
    return SavedLogits(file)


def compared(experiment: Experiment, windows: Windows, logits: SavedLogits) -> Row:
    from tandem.quality.compare import Candidate, Comparison
    from tandem.quality.stream import LayerStream

    candidate = Candidate(experiment.name, LayerStream(experiment.variant(), windows))
    experiment.change(candidate.stream)
    base, (result,) = Comparison(windows, logits, [candidate], progress=_tenths(experiment.name)).run()
    assert base is not None
    return _row(result, experiment.bits, base)


def _tenths(name: str) -> Callable[[str, int, int], None]:
    """Says on stderr how far it is, ten times."""

    def report(what: str, done: int, steps: int) -> None:
        if 10 * done // steps > 10 * (done - 1) // steps:
            progress(f"{name}, {what}, {done / steps:.0%}")

    return report


def _row(each: CandidateResult, bits: float, base: float) -> Row:
    d = each.divergence
    assert d is not None
    return {
        "bench": "quality", "what": each.label, "bits": bits, "tokens": TOKENS, "perplexity": each.perplexity,
        "reference_perplexity": base, "kl": d.mean, "kl_error": d.error, "same_top": d.same_top,
    }  # fmt: skip


def table(rows: list[Row]) -> str:
    """In the order of KL, the smallest first."""
    lines = [
        "| experts | bits per weight | perplexity | KL mean ± error | same top token |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in sorted(rows, key=lambda row: float(row["kl"])):
        change = row["perplexity"] / row["reference_perplexity"] - 1
        kl = f"{row['kl']:.5f} ± {row['kl_error']:.5f}"
        what = SHOWN.get(row["what"], row["what"])
        lines.append(f"| {what} | {row['bits']:g} | {change:+.2%} | {kl} | {row['same_top']:.2%} |")
    return "\n".join(lines)


def rows_kept() -> list[Row]:
    """The newest of each."""
    files = RESULTS.glob("*/quality.json")
    rows = [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))]
    return list({row["what"]: row for row in sorted(rows, key=lambda row: str(row["date"]))}.values())


def filled(page: str) -> str:
    rows = rows_kept()
    runs = sorted({f"{row['machine']}, commit {row['commit']}, {row['date'][:10]}" for row in rows})
    said = f"Measured on {'; '.join(runs)}."
    block = f"{BEGIN}\n{table(rows)}\n\n{said}\n{END}"
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: block, page, flags=re.S)


def of_methods() -> dict[str, Any]:
    """Figures of the demo model's formats, as `kt bench decode` and `kt plan` have them: methods, and GGUF's types."""
    rows = {name: row for row in rows_kept() if (name := _method(row["what"]))}
    return {
        name: {key: round(row[key], 5) for key in ("kl", "kl_error", "same_top")} for name, row in rows.items()
    }


def _method(what: str) -> str:
    """`Q4_K A8` of a row's name; "": it has no such name."""
    found = re.fullmatch(r"(?:GGUF |`--kt-method )(\w+)`?( `?--kt-int8-activations`)?", what)
    return found[1] + (A8 if found[2] else "") if found else ""


def _measure_and_keep(ggml: Path | None, only: Collection[str], results: Path) -> None:
    rows = list[Row]()
    try:
        rows.extend(measured(ggml, only))
    finally:
        if rows:
            keep(rows, results)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", type=Path, metavar="DIRECTORY", help="of results, to keep the rows in")
    parser.add_argument("--ggml", type=Path, metavar="LIBRARY", help="libggml-base.so: GGUF's types, too")
    parser.add_argument("--only", action="append", default=[], metavar="ROW", help="and keep the other rows")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    if asked.measure:
        _measure_and_keep(asked.ggml, asked.only, asked.measure)
    page = PAGE.read_text(encoding="utf-8")
    if asked.write:
        PAGE.write_text(filled(page), encoding="utf-8")
        DEMO_FILE.write_text(json.dumps(of_methods(), indent=1) + "\n", encoding="utf-8")
    return int(asked.check and filled(page) != page)


if __name__ == "__main__":
    sys.exit(main())
