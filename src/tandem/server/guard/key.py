"""The server's API key: where it comes from, and that the machine's other users do not see it."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import stat
from pathlib import Path

from tandem.errors import ConfigError
from tandem.flags import env
from tandem.flags.engine_config import EngineConfig

MOST_BYTES = 4096
_ARG_START = 45  # fields of /proc/self/stat behind the program's name: arg_start, arg_end (proc(5))


def with_key(config: EngineConfig) -> EngineConfig:
    """`config` with the key of --api-key, --api-key-file or TANDEM_API_KEY, in this order. Raises ConfigError."""
    key = config.api_key
    if key is not None and config.api_key_file is not None:
        raise ConfigError("--api-key and --api-key-file are both given; give one")
    if key is not None:
        hide(key)
    elif config.api_key_file is not None:
        key = _read(Path(config.api_key_file))
    else:
        key = env.api_key()
    if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key and key):
        raise ConfigError(
            "the API key must be printable ASCII without spaces around it; make one: openssl rand -hex 32"
        )
    return dataclasses.replace(config, api_key=key)


def check_key(config: EngineConfig) -> None:
    """As `with_key`, long before the start that takes the key. A pipe or a terminal is left for that one: it can be
    read once."""
    path = config.api_key_file
    if path is None or os.path.isfile(path) or not os.path.exists(path):
        with_key(config)


def _read(path: Path) -> str:
    """The only line of a file, of which a pipe or a secret's mount is one, too."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--api-key-file {path} cannot be read: {error.strerror}") from error
    lines = content.decode(errors="replace").splitlines()
    if len(content) > MOST_BYTES or len(lines) != 1:
        raise ConfigError(f"--api-key-file {path} must have one line, the key")
    return lines[0].strip()


def readable_by_others(config: EngineConfig) -> bool:
    """Whether the key's file is anybody's to read."""
    path = config.api_key_file
    with contextlib.suppress(OSError):
        return path is not None and bool(Path(path).stat().st_mode & stat.S_IROTH)
    return False


def hide(secret: str) -> None:
    """Overwrites it in this process's arguments, which `ps` shows to everybody. Where that cannot be done it stays."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_START + 1])
        if not 0 < start < end:  # the system does not tell
            return
        secret_bytes = secret.encode()
        arguments = ctypes.string_at(start, end - start)
        at = arguments.find(secret_bytes) if secret_bytes else -1
        while at >= 0:
            ctypes.memset(start + at, ord("*"), len(secret_bytes))
            at = arguments.find(secret_bytes, at + len(secret_bytes))
