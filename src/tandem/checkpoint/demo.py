"""`build_demo`: SmolLM2-135M-Instruct upcycled to a true Mixture of Experts, written as a Hugging Face directory.

Apache-2.0 parts only. 413.8 M parameters, 829 MB; about ten seconds; the same bytes every time.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tandem.checkpoint.demo_source import base_gguf, sha256_of, trained_parts
from tandem.checkpoint.demo_text import RECIPE, write_text_files
from tandem.checkpoint.demo_weights import LAYERS, DemoWeights
from tandem.checkpoint.mapped.shards import INDEX
from tandem.errors import CheckpointError, ConfigError
from tandem.hub.demo_check import known_whole, remember_whole, state_of
from tandem.process.held_signals import held_signals

Progress = Callable[[str, int, int], None]  # what is being done, how much of how much is done

MANIFEST = "manifest.json"
_FILES = re.compile(
    r"\.checked(\.\d+)?|model-\d+-of-\d+\.safetensors|model\.safetensors\.index\.json"
    r"|(config|generation_config|manifest|tokenizer|tokenizer_config)\.json"
)
LAYERS_PER_SHARD = 5  # memory is bounded by one shard: 190 MB
WEIGHTS_SHA256 = "ef1ec7a0d52b23225a25c42392dff595b88f9f7404c2e103fac1a8bdc5ae2b90"


def build_demo(out_dir: str | Path, progress: Progress | None = None) -> Path:
    """Builds the demo model in `out_dir`, unless it is there and whole; returns the directory.

    Atomic: built beside `out_dir` and renamed. Two builders at once: one waits for the other. Raises
    CheckpointError when the base weights cannot be had, the files cannot be written or the result is not what it
    should be, ConfigError when `out_dir` holds anything else.
    """
    out, report = Path(out_dir), progress or (lambda _name, _done, _total: None)
    if known_whole(out) or demo_is_whole(out):  # perhaps where this process may only read
        return out
    with _write_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with _locked(out.with_name(f".{out.name}.lock")):
            if not demo_is_whole(out):
                _refuse_other_files(out)
                with _scratch_for(out) as scratch:
                    _build(Path(scratch), report)
                    _put_in_place(Path(scratch) / "model", out)
                manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
                remember_whole(out, state_of(out, manifest["files"]))
    return out


def _scratch_for(out: Path) -> tempfile.TemporaryDirectory[str]:
    """A directory beside `out`. Ctrl+C waits until Python knows that it has to remove it."""
    with held_signals():
        return tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-")


@contextmanager
def _write_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the demo model cannot be written to {out}: {error}; it needs 2 GB there (TANDEM_CACHE_DIR, or kt demo "
            "--out, names another place)"
        ) from error


def demo_is_whole(directory: Path) -> bool:
    """Whether every file of the manifest is there with its checksum, and the manifest is this version's.
    Reads them all; then it is known until one changes."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        state = state_of(directory, manifest["files"])
        ours = manifest["weights"] == WEIGHTS_SHA256 and manifest["recipe"] == RECIPE
        whole = ours and all(
            sha256_of(directory / name) == digest for name, digest in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    if whole:
        remember_whole(directory, state)
    return whole


def _build(scratch: Path, report: Progress) -> None:
    report("fetching SmolLM2-135M-Instruct", 0, LAYERS)
    weights = DemoWeights(base_gguf(scratch), trained_parts())
    model = scratch / "model"
    model.mkdir()
    write_text_files(weights.gguf, model)
    digest = _write_shards(weights, model, report)
    if digest != WEIGHTS_SHA256:
        raise CheckpointError(
            f"the demo weights came out as {digest}, expected {WEIGHTS_SHA256}: report this"
        )
    for file in model.iterdir():
        file.chmod(0o644)  # safetensors writes 600
    files = {file.name: sha256_of(file) for file in sorted(model.iterdir())}
    manifest = {"weights": digest, "recipe": RECIPE, "files": files}
    (model / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _write_shards(weights: DemoWeights, model: Path, report: Progress) -> str:
    """The safetensors files and their index; returns the digest of all tensors, whatever files they are in."""
    digest, weight_map, total = hashlib.sha256(), {}, 0
    shards = LAYERS // LAYERS_PER_SHARD
    for shard in range(shards):
        tensors = dict(weights.outer()) if shard == 0 else {}
        for index in range(shard * LAYERS_PER_SHARD, (shard + 1) * LAYERS_PER_SHARD):
            tensors.update(weights.layer(index))
            report("building layers", index + 1, LAYERS)
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        for key in sorted(tensors):
            digest.update(f"{key} {tuple(tensors[key].shape)} ".encode())
            digest.update(_bytes(tensors[key]))
            weight_map[key] = name
            total += tensors[key].nbytes
        save_file(tensors, model / name, metadata={"format": "pt"})
    index_json = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (model / INDEX).write_text(json.dumps(index_json, indent=2) + "\n", encoding="utf-8")
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def _refuse_other_files(out: Path) -> None:
    """Raises ConfigError if `out` holds anything but a demo model, damaged or older: it is replaced as a whole."""
    if not out.exists():
        return
    names = sorted(file.name for file in out.iterdir()) if out.is_dir() else [out.name]
    others = [name for name in names if not _FILES.fullmatch(name)]
    if others or (names and MANIFEST not in names):
        raise ConfigError(f"{out} holds {(others or names)[0]}, which is no demo model's: give a new directory")


def _put_in_place(model: Path, out: Path) -> None:
    if out.exists():
        out.rename(model.parent / "replaced")
    model.rename(out)
    shutil.rmtree(model.parent / "replaced", ignore_errors=True)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
