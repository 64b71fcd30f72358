"""A model's files, there before it is loaded: the demo model is built, a name of the hub is fetched.

Configuration and index come first. So whether the model fits is known before the weights are fetched.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from tandem.checkpoint import demo_dir, resolve_model
from tandem.engine.start.demo_model import prepare_demo
from tandem.engine.start.planning import Planned, planned
from tandem.errors import CheckpointError, ConfigError, HubError
from tandem.flags.engine_config import EngineConfig
from tandem.hub.download import Download
from tandem.hub.files import CONFIG, RemoteFile, gguf_variants, is_whole, small_files
from tandem.hub.look import HEADER_BYTES, gguf_files, safetensors_files, wants_gguf, write_headers
from tandem.hub.names import HubName, hub_name
from tandem.hub.remote import Hub, RemoteModel
from tandem.hub.snapshot import find_snapshot, read_snapshot
from tandem.kernels.this_machine import this_machine
from tandem.text.tokenizer import Tokenizer

LINES = 10  # that say how far a download is, where nobody watches a bar

T = TypeVar("T")
Planner = Callable[[Path], Planned]
Shown = Callable[[Planned, int], None]


def prepare(config: EngineConfig, shown: Shown | None = None, force: bool = False) -> None:
    """Builds the demo model, or fetches what `config` names and is not in the cache.

    shown(planned, bytes to come) is called before the weights are fetched. Raises ConfigError when the model would not
    fit (`force`: it is fetched nevertheless), HubError, and CheckpointError for a directory that does not exist.
    """
    if config.kt_weight_path is not None and (experts := hub_name(config.kt_weight_path)) is not None:
        fetch(experts)
    name = hub_name(config.model)
    if name is not None:
        fetch(name, lambda path: planned(config, this_machine(), path), shown, force)
    elif resolve_model(config.model) == demo_dir():
        prepare_demo(demo_dir())


def fetch(
    name: HubName, plan: Planner | None = None, shown: Shown | None = None, force: bool = False
) -> Path:
    """The model's directory or GGUF file in the cache. What is whole there is taken as it is: nobody is asked."""
    snapshot = find_snapshot(name)
    if snapshot is not None and snapshot.model is not None:
        return snapshot.model
    return pull(name, plan, shown, force)


def pull(name: HubName, plan: Planner | None = None, shown: Shown | None = None, force: bool = False) -> Path:
    """The newest of it, whatever is in the cache."""
    with Hub.open(name) as hub:
        model = hub.look(name)
        weights = _weights(hub, model)
        with _progress(f"fetching {name}", hub, model) as download:
            missing = download.missing_bytes(weights)
        if missing and plan is not None:
            _check_plan(hub, model, weights, plan, (shown, force, missing))
        with _progress(f"fetching {name}", hub, model, weights) as download:
            download.check_disk(weights)
            directory = download.fetch(weights)
            download.finish()
    snapshot = read_snapshot(directory, _named(name, weights))
    if snapshot.model is None:
        raise HubError(f"{name} is not whole: {', '.join(snapshot.missing)} is missing in {directory}")
    return snapshot.model


def inspect(model: str, look: Callable[[Path], T]) -> T:
    """Calls `look` on the model's files. For a name that is not here, on those that describe it: its weights are not
    fetched. Where no hub answers, the files that describe it may be here."""
    name = hub_name(model)
    if name is None:
        return look(resolve_model(model))
    snapshot = find_snapshot(name)
    if snapshot is not None and snapshot.model is not None:
        return look(snapshot.model)
    try:
        with Hub.open(name) as hub:
            remote = hub.look(name)
            return _looked(hub, remote, _weights(hub, remote), look)
    except HubError:
        if snapshot is None or name.variant or not (snapshot.directory / CONFIG).is_file():
            raise
        return look(snapshot.directory)


Inspected = tuple[str, int, T | CheckpointError]


def inspect_each(model: str, look: Callable[[Path], T]) -> list[Inspected[T]]:
    """`look` of each quantisation of a folder or a repository of GGUF files, of which none was named: its name as a
    model's, its files' bytes, and why it is not read. Weights are not fetched. []: there is one, or none."""
    name = hub_name(model)
    if name is None:
        folder = Path(model).expanduser()
        if not folder.is_dir() or (folder / CONFIG).exists():
            return []
        files = {path.name: path for path in folder.glob("*.gguf")}
        models = [[files[part] for part in parts] for parts in _several(files)]
        return [
            (str(paths[0]), sum(path.stat().st_size for path in paths), _or_error(partial(look, paths[0])))
            for paths in models
        ]
    if name.variant:
        return []
    with Hub.open(name) as hub:
        remote = hub.look(name)
        if not wants_gguf(remote):
            return []
        by_name = {file.name: file for file in remote.files}
        return [_inspected(hub, remote, [by_name[part] for part in parts], look) for parts in _several(by_name)]


def _several(names: Iterable[str]) -> list[list[str]]:
    """Files of each whole model; []: fewer than two."""
    models = [files for _, files in sorted(gguf_variants(names).items()) if is_whole(files)]
    return models if len(models) > 1 else []


def _or_error(read: Callable[[], T]) -> T | CheckpointError:
    try:
        return read()
    except CheckpointError as error:
        return error


def _inspected(
    hub: Hub, model: RemoteModel, files: list[RemoteFile], look: Callable[[Path], T]
) -> Inspected[T]:
    stem = next(iter(gguf_variants(file.name for file in files)))
    label = HubName(model.name.repo, model.name.revision, stem.rsplit("/", 1)[-1])
    nbytes = sum(file.nbytes for file in files)
    return str(label), nbytes, _or_error(lambda: _looked(hub, model, files, look))


def _named(name: HubName, weights: list[RemoteFile]) -> HubName:
    """With the quantisation that was fetched."""
    one = weights[0].name
    return HubName(name.repo, name.revision, one) if one.endswith(".gguf") else name


def _weights(hub: Hub, model: RemoteModel) -> list[RemoteFile]:
    """After everything small was fetched."""
    if wants_gguf(model):
        return gguf_files(model)
    with _progress(f"reading {model.name}", hub, model, small := small_files(model.files)) as download:
        return safetensors_files(model, download.fetch(small))


def _check_plan(
    hub: Hub,
    model: RemoteModel,
    weights: list[RemoteFile],
    plan: Planner,
    how: tuple[Shown | None, bool, int],
) -> None:
    """Raises ConfigError with the plan's reasons where the model would not run here, CheckpointError where its text
    cannot be read."""
    shown, force, missing = how
    hint = f"{model.name} was not fetched ({missing / 1e9:.1f} GB); --force fetches it nevertheless"
    try:
        outcome = _looked(hub, model, weights, plan)
    except ConfigError as error:
        if force:
            return
        raise type(error)(*error.reasons, hint) from error
    if not (force or wants_gguf(model)):  # a GGUF file has its tokenizer inside
        try:
            _looked(hub, model, weights, Tokenizer.load)
        except CheckpointError as error:
            raise CheckpointError(f"{error}. {hint}") from error
    if shown is not None:
        shown(outcome, missing)


def _looked(hub: Hub, model: RemoteModel, weights: list[RemoteFile], look: Callable[[Path], T]) -> T:
    if not wants_gguf(model):
        return look(Download(hub, model, lambda _n: None, print).directory)
    for nbytes in HEADER_BYTES:
        with tempfile.TemporaryDirectory(prefix="tandem-headers-") as folder:
            first = write_headers(hub, model, weights, Path(folder), nbytes)
            try:
                return look(first)
            except CheckpointError:
                if nbytes == HEADER_BYTES[-1]:
                    raise
    raise AssertionError


@contextmanager
def _progress(
    what: str, hub: Hub, model: RemoteModel, files: list[RemoteFile] | None = None
) -> Iterator[Download]:
    """A download of `files`, and a bar on stderr; a few lines where that is no terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    total = sum(file.nbytes for file in files or ())
    lines = _FileLines(what, total, console)
    with Progress(
        *columns, console=console, transient=True, disable=not (console.is_terminal and files)
    ) as bar:
        task = bar.add_task(what, total=total)

        def report(nbytes: int) -> None:
            bar.advance(task, nbytes)
            lines.advance(nbytes)

        def say(text: str) -> None:
            console.print(f"note: {text}", markup=False, highlight=False, soft_wrap=True)

        download = Download(hub, model, report, say)
        report(total - download.missing_bytes(files or ()))
        yield download


class _FileLines:
    """How far it is, now and then, where a bar cannot be drawn."""

    def __init__(self, what: str, total: int, console: Console) -> None:
        self._what, self._total, self._console = what, total, console
        self._done = 0
        self._printed = LINES if console.is_terminal or total < 1 << 30 else 0

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        if self._printed < LINES and self._done * LINES >= self._total * (self._printed + 1):
            self._printed = self._done * LINES // self._total
            text = f"{self._what}: {self._done / 1e9:.1f} of {self._total / 1e9:.1f} GB"
            self._console.print(text, markup=False, highlight=False)
