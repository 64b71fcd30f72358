"""The table of docs/quality.md: what each format and mode costs the demo model.

    python scripts/quality_table.py --measure benchmarks/results       # half an hour on two cores; 3 GB of /tmp
    python scripts/quality_table.py --write                            # the table, from those rows
    python scripts/quality_table.py --check                            # exit code 1 where the page says something else

Only routed experts are rounded, each to the nearest code. K-quants and codebooks are rounded by llama.cpp's own code:
`--ggml libggml-base.so`, which llama-cpp-python has. Their blocks have 256 weights, and the demo model's rows 576 or
192: blocks go on from row to row there, which no file could say. `--only NAME` measures this row, and keeps the others.
A KV cache in fp8 is measured where a GPU since Ada is; without one its rounding alone, in the CPU's cache.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
SUPPORT = ROOT / "tests" / "support"
sys.path[:0] = [str(ROOT / "src"), str(SUPPORT), str(SUPPORT / "gguf_models")]

from tandem.bench.rows import keep, machine_name, stamp  # noqa: E402
from tandem.planner.forecast.quantisations import KNOWN_FILE as DEMO_FILE  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

    from tandem.quality.compare import CandidateResult
    from tandem.quality.stream import LayerStream, Variant

PAGE, RESULTS = ROOT / "docs" / "quality.md", ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- formats: scripts/quality_table.py writes this -->", "<!-- /formats -->"
TOKENS, WINDOW = 2048, 512
CACHE_ROUNDED = "KV cache in fp8, its rounding alone"
UNROUNDED = "nothing rounded, another kernel tier"
ADA = (8, 9)
BLOCK = 256  # weights of a K-quant's
# name in the table: (bits per weight with its scales, key of stored_formats.MAKERS)
STORED = {
    "fp8, a scale per row": (8.0, "fp8 per channel"), "fp8, blocks of 64 × 64": (8.0, "fp8 blocks of 64"),
    "mxfp8": (8.25, "mxfp8"), "mxfp4": (4.25, "mxfp4 packed"), "nvfp4": (4.5, "nvfp4 packed"),
}  # fmt: skip
BLOCKS = {"Q8_0": 8.5, "Q5_1": 6.0, "Q5_0": 5.5, "Q4_1": 5.0, "Q4_0": 4.5}
GGML = {
    "Q6_K": 6.56, "Q5_K": 5.5, "Q4_K": 4.5, "Q3_K": 3.44, "Q2_K": 2.63, "IQ4_NL": 4.5, "IQ4_XS": 4.25, "IQ3_S": 3.44,
    "IQ3_XXS": 3.06, "IQ2_S": 2.56, "IQ2_XS": 2.31, "IQ2_XXS": 2.06, "IQ1_M": 1.75, "IQ1_S": 1.56, "TQ2_0": 2.06,
}  # fmt: skip
Row = dict[str, Any]


def variants(demo: Path, folder: Path, ggml: Path | None) -> Iterator[tuple[str, float, Callable[[], Variant]]]:
    """(name, bits per weight, what is measured). Files are written once it is called."""
    from tandem.quality.stream import Variant

    yield UNROUNDED, 16.0, lambda: Variant(demo, tier=_other_tier())
    yield "2 late experts", 16.0, lambda: Variant(demo, deferred=2)
    for method, bits in (("INT8", 8.5), ("INT4", 4.5)):
        yield f"`--kt-method {method}`", bits, partial(Variant, demo, method)
        yield (
            f"`--kt-method {method} --kt-int8-activations`",
            bits,
            partial(Variant, demo, method, int8_activations=True),
        )
    for name, (bits, stored) in STORED.items():
        yield name, bits, lambda stored=stored: Variant(_stored(demo, folder, stored))
    for name, bits in BLOCKS.items():
        yield f"GGUF {name}", bits, lambda name=name: Variant(_gguf(demo, folder, name))
    for name, bits in GGML.items() if ggml else ():
        yield f"GGUF {name}", bits, lambda name=name: Variant(_rounded(demo, folder / name, name, ggml))
    if _gpu_since_ada():
        yield "KV cache in fp8", 16.0, lambda: Variant(demo, gpu_share=0.0, cached="fp8_e4m3")
    else:
        yield CACHE_ROUNDED, 16.0, lambda: Variant(demo)


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


def _gguf(demo: Path, folder: Path, name: str) -> Path:
    from gguf_files import Kind, write_gguf

    def choose(tensor: str, array: Any) -> Kind:
        return (
            Kind[name]
            if "_exps" in tensor
            else Kind.F32
            if array.ndim == 1 or "_inp" in tensor
            else Kind.BF16
        )

    return write_gguf(demo, folder / f"{name}.gguf", choose, pre="smollm")


def _rounded(demo: Path, target: Path, name: str, ggml: Path) -> Path:
    """The demo model with experts that went through llama.cpp's blocks of this type and back, in bf16."""
    from safetensors.torch import save_file

    from tiny import file_tensors

    target.mkdir()
    for file in demo.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            shutil.copyfile(file, target / file.name)
    through = _blocks(name, ggml)
    tensors = {
        key: through(tensor) if ".experts." in key and tensor.dim() == 2 else tensor
        for key, tensor in file_tensors(demo).items()
    }
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def _blocks(name: str, ggml: Path) -> Callable[[Tensor], Tensor]:
    """Rounds a matrix to the type's codes. All weights are as important; some types ask for that."""
    import gguf
    import numpy as np
    import torch

    library, kind = ctypes.CDLL(str(ggml)), gguf.GGMLQuantizationType[name]
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    pointer, alike = ctypes.c_void_p, np.ones(BLOCK, np.float32)

    def through(tensor: Tensor) -> Tensor:
        flat = np.ascontiguousarray(tensor.float().reshape(-1, BLOCK).numpy())
        codes = np.zeros((len(flat), BLOCK // block * nbytes), np.uint8)
        library.ggml_quantize_chunk(
            ctypes.c_int(kind), pointer(flat.ctypes.data), pointer(codes.ctypes.data), ctypes.c_int64(0),
            ctypes.c_int64(len(flat)), ctypes.c_int64(BLOCK), pointer(alike.ctypes.data),
        )  # fmt: skip
        found = torch.from_numpy(gguf.dequantize(codes, kind).reshape(tuple(tensor.shape)))
        return found.to(tensor.dtype)

    return through


def _gpu_since_ada() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= ADA


def measured(ggml: Path | None, only: Collection[str]) -> Iterator[Row]:
    """One after the other: all beside one reference would take 20 GB. only: names of rows; empty: all."""
    from tandem.checkpoint import demo_dir
    from tandem.engine.start.demo_model import prepare_demo
    from tandem.machine.machine import Machine
    from tandem.quality import text
    from tandem.quality.compare import Candidate, Comparison
    from tandem.quality.stream import LayerStream, Variant
    from tandem.text.tokenizer import Tokenizer

    demo = prepare_demo(demo_dir())
    windows = text.cut(Tokenizer.load(demo), text.default_text(), WINDOW, TOKENS)
    said = stamp(machine_name(Machine.detect()))
    with tempfile.TemporaryDirectory(prefix="tandem-quality-") as folder:
        for name, bits, variant in variants(demo, Path(folder), ggml):
            if only and name not in only:
                continue
            reference = LayerStream(Variant(demo), windows)
            candidate = Candidate(name, LayerStream(variant(), windows, reference.pool))
            if name == CACHE_ROUNDED:
                round_cache(candidate.stream)
            base, (found,) = Comparison(windows, reference, [candidate]).run()
            assert base is not None
            row = _row(found, bits, base) | said
            print(json.dumps(row), file=sys.stderr, flush=True)
            yield row
            for written in Path(folder).iterdir():
                shutil.rmtree(written) if written.is_dir() else written.unlink()


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
        lines.append(f"| {row['what']} | {row['bits']:g} | {change:+.2%} | {kl} | {row['same_top']:.2%} |")
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
    """Figures of the demo model's formats, as `kt bench decode` and `kt plan` have them; GGUF's types by name."""
    rows = rows_kept()
    wanted = {f"`--kt-method {method}`": method for method in ("INT8", "INT4")} | {"mxfp4": "MXFP4", "nvfp4": "NVFP4"}
    wanted |= {row["what"]: row["what"].removeprefix("GGUF ") for row in rows if row["what"].startswith("GGUF ")}
    return {
        wanted[row["what"]]: {name: round(row[name], 5) for name in ("kl", "kl_error", "same_top")}
        for row in rows
        if row["what"] in wanted
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", type=Path, metavar="DIRECTORY", help="of results, to keep the rows in")
    parser.add_argument("--ggml", type=Path, metavar="LIBRARY", help="libggml-base.so: K-quants and codebooks, too")
    parser.add_argument("--only", action="append", default=[], metavar="ROW", help="and keep the other rows")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    if asked.measure:
        keep(list(measured(asked.ggml, asked.only)), asked.measure)
    page = PAGE.read_text(encoding="utf-8")
    if asked.write:
        PAGE.write_text(filled(page), encoding="utf-8")
        DEMO_FILE.write_text(json.dumps(of_methods(), indent=1) + "\n", encoding="utf-8")
    return int(asked.check and filled(page) != page)


if __name__ == "__main__":
    sys.exit(main())
