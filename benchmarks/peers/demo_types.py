"""The demo model's GGUF files in llama.cpp and in Tandem, on the CPU: tokens per second and KL side by side.

    python benchmarks/peers/demo_types.py --llama LLAMA.CPP BUILD --type Q8_0 --type Q4_0
    python benchmarks/peers/demo_types.py        # llama-cpp-python of $PEER_LLAMA_CPP (an interpreter), or of this one

Rates are measured in turns, as `gguf_types.py` does, with its columns. KL is of the text and against the unrounded
model that docs/quality.md's table has: `kl` of Tandem, `kl_peer` of llama.cpp. Experts are of the type, the rest bf16:
rows of 576 and 192 weights have no K-quants.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

ROOT, HERE = Path(__file__).resolve().parents[2], Path(__file__).resolve().parent
sys.path += [str(HERE), str(ROOT / "scripts"), str(ROOT / "src")]

from compare import demo  # noqa: E402
from gguf_types import Engine, engines, measured, peer_program, peer_version  # noqa: E402
from quality_table import Experiment, compared, save_logits, text_windows  # noqa: E402

from tandem.bench.rows import keep, machine_name, stamp  # noqa: E402
from tandem.machine.machine import Machine  # noqa: E402

if TYPE_CHECKING:
    from tandem.quality.measures import Divergence
    from tandem.quality.saved_logits import SavedLogits
    from tandem.quality.text import Windows

ROWS = 64  # of logits at a time
TYPES = "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"  # whose blocks rows of 576 and 192 weights fill
Row = dict[str, Any]


class Reference(NamedTuple):
    """The text, and what the unrounded model says of it."""

    windows: Windows
    logits: SavedLogits


def peer_divergence(peer: Engine, reference: Reference, folder: Path) -> Divergence:
    """KL of the peer's logits at each prediction of the text."""
    import numpy as np
    import torch

    from tandem.quality.measures import Divergence, divergences, top_tokens

    windows, logits = reference
    read, written, vocab = folder / "ids", folder / "logits", logits.origin.vocab
    kl, same_top, first = list[torch.Tensor](), list[torch.Tensor](), 0
    for ids, span in zip(windows.ids, windows.spans, strict=True):
        read.write_bytes(np.asarray(ids, np.int32).tobytes())
        peer.seconds(f"logits {len(ids)} {read} {written}")
        found = torch.from_numpy(np.fromfile(written, np.float32).reshape(len(ids), vocab))
        inside = (windows.predicting >= span.start) & (windows.predicting < span.stop)
        for rows in (windows.predicting[inside] - span.start).split(ROWS):
            truth = logits.rows(first, first + len(rows))
            kl.append(divergences(truth, found[rows]))
            same_top.append(found[rows].argmax(-1) == top_tokens(truth))
            first += len(rows)
    return Divergence.of(torch.cat(kl), torch.cat(same_top))


def qualities(file: Path, int8: bool, peer: Engine, reference: Reference) -> Row:
    """KL and top tokens of both."""
    from tandem.quality.stream import Variant

    ours = compared(Experiment(file.name, 0.0, lambda: Variant(file, int8_activations=int8)), *reference)
    theirs = peer_divergence(peer, reference, file.parent)
    return {name: ours[name] for name in ("kl", "kl_error", "same_top")} | {
        "kl_peer": theirs.mean, "kl_error_peer": theirs.error, "same_top_peer": theirs.same_top,
    }  # fmt: skip


def table(rows: list[Row]) -> str:
    lines = [
        "| type, activations | | decode, tokens/s | prompt, tokens/s | KL mean ± error | same top token |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        for name, end in (("Tandem", ""), (f"llama.cpp {row['version']}", "_peer")):
            prompts = ", ".join(f"{row[key]:g}" for key in row if re.fullmatch(rf"prompt_\d+_tok_s{end}", key))
            kl = f"{row[f'kl{end}']:.5f} ± {row[f'kl_error{end}']:.5f}"
            what = f"{row['format']}, {row['activations']} | {name} | {row[f'decode_tok_s{end}']:g}"
            lines.append(f"| {what} | {prompts} | {kl} | {row[f'same_top{end}']:.2%} |")
    return "\n".join(lines)


class Peer:
    """llama.cpp: its version, and the command that begins its turns."""

    def __init__(self, build: tuple[Path, Path] | None, folder: Path) -> None:
        python = os.environ.get("PEER_LLAMA_CPP", sys.executable)
        if build is None:
            asked = [python, "-c", "import llama_cpp; print(llama_cpp.__version__)"]
            done = subprocess.run(asked, capture_output=True, text=True)
            if done.returncode:
                sys.exit("llama.cpp is missing: pip install llama-cpp-python, or give --llama")
            self.version = f"llama-cpp-python {done.stdout.strip()}"
            self.command = [python, str(HERE / "llama_cpp_turns.py")]
        else:
            self.version, self.command = peer_version(build[1]), [str(peer_program(*build, folder))]


def row_of(kind: str, flags: argparse.Namespace, peer: Peer, reference: Reference, folder: Path) -> Row:
    _, file = demo(folder, kind)
    threads, rounded = str(flags.threads), ["int8"] if flags.int8_activations else []
    own = [sys.executable, str(HERE / "kt_turns.py"), str(file), threads, *rounded]
    row: Row = {"bench": "peers", "config": "demo", "format": kind.lower(), "peer": "llama.cpp"}
    row |= {"threads": flags.threads, "activations": "int8 in both" if rounded else "exact here, int8 there"}
    with engines([own, [*peer.command, str(file), threads]]) as (ours, theirs):
        row |= measured(ours, theirs, f"decode {flags.decode}", flags.rounds)
        found = measured(ours, theirs, f"prompt {flags.prompt}", max(2, flags.rounds // 2))
        row |= {name.replace("prompt", f"prompt_{flags.prompt}"): value for name, value in found.items()}
        row |= {"ratio": row["decode_ratio"], "load": round(os.getloadavg()[0], 1), "rounds": flags.rounds}
        row |= qualities(file, flags.int8_activations, theirs, reference)
    file.unlink()
    return row | {"version": peer.version}


def rows_of(flags: argparse.Namespace, folder: Path) -> Iterator[Row]:
    from tandem.checkpoint import demo_dir
    from tandem.engine.start.demo_model import prepare_demo

    peer = Peer(flags.llama, folder)
    directory = prepare_demo(demo_dir())
    windows = text_windows(directory)
    reference = Reference(windows, save_logits(directory, windows, folder / "reference.safetensors"))
    for kind in flags.type or ("Q8_0", "Q4_0"):
        yield row_of(kind, flags, peer, reference, folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", nargs=2, type=Path, metavar=("SOURCE", "BUILD"))
    parser.add_argument("--type", action="append", choices=TYPES, help="default: Q8_0, Q4_0")
    parser.add_argument("--threads", type=int, default=len(Machine.detect().cores))
    parser.add_argument("--decode", type=int, default=32, metavar="TOKENS")
    parser.add_argument("--prompt", type=int, default=512, metavar="TOKENS")
    parser.add_argument("--int8-activations", action="store_true", help="here, too, which is lossy")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="of results, to add the rows to")
    flags = parser.parse_args()
    rows, columns = list[Row](), stamp(machine_name(Machine.detect(), flags.threads))
    for path, name in zip(flags.llama or (), ("LLAMA.CPP", "BUILD"), strict=False):
        columns["command"] = columns["command"].replace(str(path), name)
    with tempfile.TemporaryDirectory(prefix="tandem-peers-") as scratch:
        for row in rows_of(flags, Path(scratch)):
            rows.append(row | columns)
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(table(rows))
    if flags.keep:
        keep(rows, flags.keep)
    return 0


if __name__ == "__main__":
    sys.exit(main())
