"""A server of our own for the length of a measurement."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO

from tandem.bench.load_client import LoadError
from tandem.flags.engine_config import EngineConfig
from tandem.flags.ways import argv_on_one_gpu

_READY = re.compile(r" is ready at (http://\S+)")
_STOP_SECONDS = 20
KT_SERVE = ("tandem", "serve")


@contextmanager
def own_server(model: str, flags: Sequence[str], program: Sequence[str] = KT_SERVE) -> Iterator[str]:
    """The address of `program model flags` on a free port; it is stopped at the end. Raises LoadError with what it
    printed when it does not start."""
    with tempfile.TemporaryFile() as output:
        command = [sys.executable, "-P", "-m", *program, *_on_free_port(argv_on_one_gpu([model, *flags]))]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield _address(process, output)
        finally:
            _stop(process)


def _on_free_port(argv: list[str]) -> list[str]:
    """A command line of `kt serve`, with `--port 0` unless it names one."""
    config, _ = EngineConfig.possible(argv)
    return argv if config is not None and "port" in config.explicit else [*argv, "--port", "0"]


def _address(process: subprocess.Popen[bytes], output: BinaryIO) -> str:
    while True:
        output.seek(0)
        text = output.read().decode(errors="replace")
        if ready := _READY.search(text):
            return ready[1]
        if process.poll() is not None:
            raise LoadError(f"kt serve ended with {process.returncode}:\n{text[-2000:]}")
        time.sleep(0.1)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
