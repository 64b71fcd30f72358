"""`PackedCache`: packed weights of one model on disk, so that the second start maps them and packs nothing.

It is a convenience: whatever is wrong with it is said in one line, and the model is loaded from its checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tandem import _core
from tandem.errors import CacheDamaged, CheckpointError
from tandem.kernels.cpu import PackedExperts, PackedMatrix
from tandem.kernels.packed.file import PackedFile, PackedWriter
from tandem.kernels.packed.verification import Verification, Verified

Say = Callable[[str], None]
Packed = PackedMatrix | PackedExperts


class PackedCache:
    """Hands out what the file holds; what it lacks is kept with `keep` and written while loading goes on.

    key: whatever decides the packed bytes. A file with another key, or a damaged one, is replaced. dense: whether
    matrices are taken from it, too, not only experts: on a GPU they lie in another order.
    """

    def __init__(
        self,
        path: Path,
        key: str,
        about: str,
        workspace: _core.Workspace,
        pool: _core.WorkerPool,
        say: Say,
        dense: bool = True,
    ) -> None:
        self.path, self._key, self._about, self.dense = path, key, about, dense
        self._workspace, self._pool, self._say = workspace, pool, say
        self._file: PackedFile | None = None
        self._verification: Verification | None = None  # of what nobody has confirmed yet
        self._adopted: dict[str, Packed] = {}
        self._writing: _PackedWriting | None = None

    @property
    def mapped(self) -> bool:
        """Whether there is a file to take weights from."""
        return self._file is not None

    def begin(self, begun: Verification | None = None) -> None:
        """Maps the file and begins to verify it; `begun`, if it is this file's, goes on. What is taken from it
        meanwhile must not be used before `confirm`."""
        if begun is not None and (begun.file.path != self.path or begun.file.table.key != self._key):
            begun.stop()
            begun = None
        if begun is None and not self.path.exists():
            return
        try:
            self._verification = begun or self._begun()
        except (CheckpointError, OSError) as error:
            self._refuse(error)
        else:
            self._file = self._verification.file

    def _begun(self) -> Verification:
        file = PackedFile(self.path)
        if file.table.key != self._key:
            raise CheckpointError(f"{self.path} was made from {file.table.about}, not from {self._about}")
        return Verification(file, self._pool, in_place=self.dense)  # what goes to a GPU is not mapped

    def confirm(self, progress: Verified) -> None:
        """Waits until all of the file is verified. CacheDamaged, after saying why, if it is not what was written: then
        whatever was taken from it is wrong, and there is no file any more."""
        if self._verification is None:
            return
        try:
            self._verification.wait(progress)
            self._verification = None
        except CheckpointError as error:
            self._verification = None
            self._file = None
            self._adopted.clear()
            self._refuse(error)
            raise CacheDamaged(str(error)) from error

    def stop(self) -> None:
        """Nobody waits for `confirm` any more."""
        if self._verification is not None:
            self._verification.stop()

    def _refuse(self, error: CheckpointError | OSError) -> None:
        reason = error if isinstance(error, CheckpointError) else f"{self.path}: {error.strerror}"
        self._say(f"packed cache: {reason}; the model is packed again")

    def matrix(self, name: str) -> PackedMatrix | None:
        section = self._file.sections.get(name) if self._file and self.dense else None
        if self._file is None or section is None:
            return None
        matrix = PackedMatrix.adopt(self._workspace, self._file, section)
        self._adopt(name, matrix)
        return matrix

    def fill(self, name: str, experts: object) -> bool:
        """Makes `experts`, a layer nothing was loaded into, the one that was kept as `name`. False if none was."""
        section = self._file.sections.get(name) if self._file else None
        if self._file is None or section is None or not isinstance(experts, PackedExperts):
            return False
        experts.adopt(self._file, section)
        self._adopt(name, experts)
        return True

    def _adopt(self, name: str, packed: Packed) -> None:
        """Notes weights that came from the file, so that they stay in it when it must be written anew."""
        self._adopted[name] = packed
        if self._writing is not None:
            self._writing.add(name, packed)

    def layer(self, name: str) -> KeptLayer:
        """The part of the cache that this layer is loaded from, or kept in."""
        return KeptLayer(self, name)

    def keep(self, name: str, packed: object) -> None:
        """Writes it; returns at once. `packed` must not be loaded into any more. What is not packed is not kept.
        CacheDamaged as `confirm`."""
        if not isinstance(packed, PackedMatrix | PackedExperts):
            return
        if self._writing is None:
            self.confirm(lambda _done, _total: None)  # what is written once more gets new checksums
            self._writing = _PackedWriting(self.path, self._pool, self._say)
            if self._file is not None:
                self._say(f"packed cache: {self.path} lacks {name}; it is written again")
                for other, packed_weights in self._adopted.items():
                    self._writing.add(other, packed_weights)
        self._writing.add(name, packed)

    def wait(self) -> None:
        """Until what was kept so far is in the file, so that its memory can be given up."""
        if self._writing is not None:
            self._writing.wait()

    def finish(self, progress: Verified) -> None:
        """Waits until everything kept is on disk."""
        if self._writing is not None:
            self._writing.finish(self._key, self._about, progress)
        self._adopted.clear()


@dataclass(frozen=True, slots=True)
class KeptLayer:
    """A layer's experts in a `PackedCache`: from an earlier start, or for a later one."""

    cache: PackedCache
    name: str

    def fill(self, experts: object) -> bool:
        return self.cache.fill(self.name, experts)

    def keep(self, experts: object) -> None:
        self.cache.keep(self.name, experts)


class _PackedWriting:
    """A thread that writes what it is given. After the first failure (a full disk) it says so and does nothing more."""

    def __init__(self, path: Path, pool: _core.WorkerPool, say: Say) -> None:
        self._path, self._pool, self._say = path, pool, say
        self._thread = ThreadPoolExecutor(1, "tandem-packed-cache")
        self._writer: PackedWriter | None = None
        self._pending: list[tuple[int, Future[None]]] = []
        self._failed = False

    def add(self, name: str, packed: Packed) -> None:
        self._pending.append(
            (packed.packed_bytes, self._thread.submit(self._guarded, self._add, name, packed))
        )

    def wait(self) -> None:
        for _, future in self._pending:
            future.result()

    def finish(self, key: str, about: str, progress: Verified) -> None:
        total, done = sum(nbytes for nbytes, _ in self._pending), 0
        for nbytes, future in self._pending:
            future.result()
            done += nbytes
            progress(done, total)
        self._thread.submit(self._guarded, self._finish, key, about).result()
        self._thread.shutdown()

    def _add(self, name: str, packed: Packed) -> None:
        if self._writer is None:
            self._writer = PackedWriter(self._path, self._pool)
        self._writer.add(name, packed.formats, packed.shape, *packed.parts())

    def _finish(self, key: str, about: str) -> None:
        if self._writer is not None:
            nbytes = self._writer.finish(key, about)
            self._say(f"packed cache: {nbytes / 1e9:.1f} GB written to {self._path}")

    def _guarded(self, step: Callable[..., None], *arguments: object) -> None:
        if self._failed:
            return
        try:
            step(*arguments)
        except BlockingIOError:
            self._failed = True
            self._say(f"packed cache: another process is writing {self._path}; this one does not")
        except OSError as error:
            self._failed = True
            self._say(
                f"packed cache: {self._path} cannot be written ({error.strerror}); serving goes on without"
            )
            if self._writer is not None:
                self._writer.abandon()
