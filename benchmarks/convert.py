"""Measures `kt convert`: peak memory of an undisturbed run, then the same with two `kill -9`, and compares every byte.

Example: python benchmarks/random_model.py deepseek-v3 DS --layers 5 --experts 60
         python benchmarks/convert.py DS SCRATCH --out result.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from tandem import __version__
from tandem.machine.machine import Machine

KILL_AFTER_SHARDS = (1, 3)


def kt_convert(model: Path, out: Path, more: list[str]) -> list[str]:
    return [sys.executable, "-m", "tandem", "convert", str(model), str(out), "--max-shard-gb", "1", *more]


def timed(command: list[str]) -> dict[str, float]:
    """Seconds and peak resident bytes, as GNU time reports them."""
    start = time.monotonic()
    run = subprocess.run(["/usr/bin/time", "-v", *command], capture_output=True, text=True, check=True)
    kilobytes = re.search(r"Maximum resident set size \(kbytes\): (\d+)", run.stderr)
    assert kilobytes
    return {"seconds": round(time.monotonic() - start, 1), "peak_bytes": 1024 * int(kilobytes[1])}


def killed_twice(command: list[str], out: Path) -> list[int]:
    """Kills the command when so many files are whole; returns how many were, then."""
    whole = []
    for shards in KILL_AFTER_SHARDS:
        process = subprocess.Popen(command)
        while len(list(out.glob("model-*.safetensors"))) < shards:
            assert process.poll() is None, "ended before it was killed"
            time.sleep(0.05)
        time.sleep(1)  # somewhere in the next file
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        whole.append(len(list(out.glob("model-*.safetensors"))))
        assert list(out.glob(".*.part")), "nothing was half written"
    return whole


def digests(directory: Path) -> dict[str, str]:
    found = {}
    for file in sorted(directory.iterdir()):
        with file.open("rb") as stream:
            found[file.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return found


def layer_bytes(model: Path) -> int:
    """Bytes of the largest file of `benchmarks/random_model.py`, which writes one for each layer."""
    return max(file.stat().st_size for file in model.glob("layer-*.safetensors"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--out", type=Path)
    asked, more = parser.parse_known_args()
    whole, killed = asked.scratch / "whole", asked.scratch / "killed"
    asked.scratch.mkdir(parents=True, exist_ok=True)
    for directory in (whole, killed):
        shutil.rmtree(directory, ignore_errors=True)
    undisturbed = timed(kt_convert(asked.model, whole, more))
    kills = killed_twice(kt_convert(asked.model, killed, more), killed)
    resumed = timed(kt_convert(asked.model, killed, more))
    machine = Machine.detect()
    result = {
        "machine": machine.cpu_model,
        "threads": machine.max_threads,
        "version": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(kt_convert(asked.model, whole, more)[1:]),
        "input_bytes": sum(file.stat().st_size for file in asked.model.glob("*.safetensors")),
        "output_bytes": sum(file.stat().st_size for file in whole.glob("*.safetensors")),
        "layer_bytes": layer_bytes(asked.model),
        "undisturbed": undisturbed,
        "files_whole_at_kill": kills,
        "resumed": resumed,
        "equal_bytes": digests(whole) == digests(killed),
    }
    print(json.dumps(result, indent=2))
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
