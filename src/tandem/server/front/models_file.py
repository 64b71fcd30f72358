"""`read_models`: the models of `kt serve --models`, from a TOML file or a directory."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.errors import ConfigError
from tandem.flags.engine_config import FLAGS, FORMER, EngineConfig
from tandem.server.errors import ApiError

FRONT_FLAGS = frozenset((
    "models", "host", "port", "uds", "api_key", "api_key_file", "allowed_origins", "allowed_hosts", "request_timeout",
    "max_queued_bytes", "sleep_idle_seconds", "served_model_name", "model",
))  # fmt: skip
STAY_SECONDS = 30.0
_OWN = ("aliases", "preload", "sleep_idle_seconds")
_GGUF = ".gguf"
_FIELDS = {keyword: flag.name for flag in FLAGS for keyword in flag.keywords} | FORMER


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One model: the name that requests say, other names, and the flags of its own `kt serve`."""

    name: str
    flags: tuple[str, ...]  # a command line: --model DIRECTORY …
    aliases: tuple[str, ...] = ()
    sleep_idle_seconds: float | None = None
    preload: bool = False  # loaded when the server starts

    @property
    def path(self) -> str:
        return self.flags[self.flags.index("--model") + 1]


@dataclass(frozen=True, slots=True)
class ModelsFile:
    """stay_seconds: so long a model stays once it is loaded, though another needs its memory. max_loaded: at once;
    None: as many as fit."""

    entries: tuple[ModelEntry, ...]
    stay_seconds: float = STAY_SECONDS
    max_loaded: int | None = None


def read_models(config: EngineConfig) -> ModelsFile:
    """config: its flags hold for all models. Raises ConfigError with every reason."""
    path = Path(str(config.models)).expanduser()
    common = {name: getattr(config, name) for name in config.explicit - FRONT_FLAGS}
    if path.is_dir():
        return _of_directory(path, common, config.sleep_idle_seconds)
    try:
        text = path.read_text(encoding="utf-8")
        return _of_table(tomllib.loads(text), common, config.sleep_idle_seconds, path)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--models {path} cannot be read: {why}; give a directory, or a TOML file") from error


def _of_directory(path: Path, common: Mapping[str, Any], idle: float | None) -> ModelsFile:
    """Folders with a config.json, and GGUF files; of a GGUF model in parts the first."""
    paths = sorted(path.iterdir())
    files = [each for each in paths if (each / "config.json").is_file()]
    files += [each for each in paths if each.suffix == _GGUF and "-of-" not in each.stem]
    files += [each for each in paths if each.suffix == _GGUF and "-00001-of-" in each.stem]
    names = {each: each.stem.partition("-00001-of-")[0] if each.suffix == _GGUF else each.name for each in files}
    if not files:
        raise ConfigError(f"--models {path} has no model: folders with a config.json, or files {_GGUF}")
    entries = (ModelEntry(names[each], words({"model": str(each), **common}), (), idle) for each in files)
    return checked(ModelsFile(tuple(entries)))


def _of_table(
    table: Mapping[str, Any], common: Mapping[str, Any], idle: float | None, path: Path
) -> ModelsFile:
    models = table.get("models")
    if not isinstance(models, dict) or not all(isinstance(each, dict) for each in models.values()) or not models:
        raise ConfigError(f'{path} names no model: it needs tables such as [models.qwen] with model = "DIRECTORY"')
    own = _numbers(table, ("sleep_idle_seconds", "stay_seconds", "max_loaded"), path)
    idle = own.get("sleep_idle_seconds", idle)
    entries, reasons = [], list[str]()
    for name, fields in models.items():
        try:
            entries.append(_entry(name, fields, common, idle, path))
        except ConfigError as error:
            reasons += (f"[models.{name}] {reason}" for reason in error.reasons)
    if reasons:
        raise ConfigError(*reasons)
    most = own.get("max_loaded")
    stay = own.get("stay_seconds", STAY_SECONDS)
    return checked(ModelsFile(tuple(entries), stay, None if most is None else max(1, int(most))))


def _numbers(table: Mapping[str, Any], names: tuple[str, ...], path: Path) -> dict[str, float]:
    """Numbers of the file itself, by name. Raises ConfigError."""
    unknown = [name for name in table if name not in (*names, "models")]
    if unknown:
        raise ConfigError(f"{path}: {unknown[0]!r} is not known; known are models, {', '.join(names)}")
    wrong = [name for name in names if name in table and type(table[name]) not in (int, float)]
    if wrong:
        raise ConfigError(f"{path}: {wrong[0]} must be a number")
    return {name: table[name] for name in names if name in table}


def _entry(
    name: str, fields: Mapping[str, Any], common: Mapping[str, Any], idle: float | None, path: Path
) -> ModelEntry:
    """Raises ConfigError."""
    table = {key.lstrip("-").replace("-", "_"): value for key, value in fields.items()}
    fronts = [key for key in table if key in FRONT_FLAGS - {"model", "sleep_idle_seconds"}]
    if fronts:
        raise ConfigError(f"{fronts[0]} is the server's own: give it to kt serve")
    if not isinstance(table.get("model"), str):
        raise ConfigError('has no model: write model = "DIRECTORY, GGUF file or name of the hub"')
    aliases = table.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise ConfigError("aliases must be a list of names")
    model = path.parent / Path(table["model"]).expanduser()
    flags = {key: value for key, value in table.items() if key not in _OWN}
    names = {_FIELDS.get(key, key) for key in flags}
    flags = {**{key: value for key, value in common.items() if key not in names}, **flags}
    flags["model"] = str(model) if model.exists() else table["model"]
    return ModelEntry(
        name, words(flags), tuple(aliases), table.get("sleep_idle_seconds", idle), bool(table.get("preload"))
    )


def words(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """A command line. Names that are no flag's stay what they are: whoever reads it names the nearest. What is False
    or None is left out."""
    spelled = {flag.name: flag.spellings[0] for flag in FLAGS}
    arguments: list[str] = []
    for name, value in sorted(fields.items(), key=lambda field: field[0] != "model"):
        if value is None or value is False:
            continue
        arguments.append(spelled.get(name, "--" + name.replace("_", "-")))
        if value is not True:
            arguments += map(str, value if isinstance(value, list | tuple) else [value])
    return tuple(arguments)


def checked(file: ModelsFile) -> ModelsFile:
    """`file` itself. Raises ConfigError: flags that cannot be, or a name that two models have."""
    reasons, owners = list[str](), dict[str, str]()
    for entry in file.entries:
        _, refusals = EngineConfig.possible(entry.flags)
        reasons += (f"{entry.name}: {reason}" for reason in refusals)
        for name in (entry.name, *entry.aliases):
            if owners.setdefault(name, entry.name) != entry.name:
                reasons.append(f"{owners[name]} and {entry.name} are both called {name!r}; give one another name")
    if reasons:
        raise ConfigError(*reasons)
    return file


def entry_named(entries: Sequence[ModelEntry], name: str | None) -> ModelEntry:
    """By its name, an alias or its path; None: the only one. Raises ApiError 404, 400."""
    names = ", ".join(repr(entry.name) for entry in entries)
    if not name:
        if len(entries) == 1:
            return entries[0]
        raise ApiError(400, f"say which model: {names}", param="model", code="model_required")
    for entry in entries:
        if {name, plain_name(name)} & {entry.name, *entry.aliases, entry.path}:
            return entry
    message = f"the model {name[:100]!r} is not served here; use {names}"
    raise ApiError(404, message, param="model", code="model_not_found")


def plain_name(name: str) -> str:
    """As Ollama's clients say it: `:latest` is the one there is."""
    return re.sub(r":latest$", "", name)


def changed(old: ModelEntry, new: ModelEntry) -> bool:
    """Whether a process that was started for `old` is no use for `new`."""
    return dataclasses.replace(old, aliases=(), sleep_idle_seconds=None, preload=False) != dataclasses.replace(
        new, aliases=(), sleep_idle_seconds=None, preload=False
    )
