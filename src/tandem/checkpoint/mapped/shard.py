"""`MappedShard`: one safetensors file, mapped. Knows where each tensor's bytes lie, so that they can be read ahead."""

from __future__ import annotations

import hashlib
import mmap
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tandem import _core
from tandem.checkpoint.mapped.pages import Pages
from tandem.errors import CheckpointError
from tandem.spec.small_files import lfs_pointer, unreadable

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
    "F64": torch.float64,
}  # fmt: skip


class TensorHeader(NamedTuple):
    """A tensor as the file's header has it; its bytes are [begin, end) of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class MappedShard:
    """Opening reads the header only. Raises CheckpointError naming the file when it is truncated or no safetensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries, self.header_digest = _entries(path)
        with path.open("rb") as file:
            # Read-only: a private writable mapping counts as memory, and a file larger than RAM would be refused.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            whole = _read_only_tensor(mapped)
            self._readable = _core.ReadableFile(file.fileno(), whole.data_ptr(), whole.numel())
        self._bytes = whole  # after it, so that the mapping is never gone while it is taken for the file

    @property
    def nbytes(self) -> int:
        return self._bytes.numel()

    def get(self, name: str) -> Tensor:
        """A view of the mapping, in the stored dtype (a copy where the file does not align it)."""
        entry = self.entries[name]
        raw, dtype = self._bytes[entry.begin : entry.end], TORCH_DTYPES[entry.dtype]
        if entry.begin % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(entry.shape)

    @property
    def all_pages(self) -> Pages:
        """Where the file lies in memory."""
        first = self._bytes.data_ptr()
        return first, first + self._bytes.numel()

    def pages(self, names: Iterable[str]) -> list[Pages]:
        """Where these tensors lie in memory."""
        entries, first = self.entries, self._bytes.data_ptr()
        return [(first + entries[name].begin, first + entries[name].end) for name in names]


def tensor_names(path: Path) -> list[str]:
    """Names of the tensors in a file. Raises CheckpointError as `MappedShard` does."""
    return list(_entries(path)[0])


def _read_only_tensor(mapped: mmap.mmap) -> Tensor:
    """Bytes that nobody may write to; the tensor keeps `mapped` alive."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapped, dtype=torch.uint8)


def _entries(path: Path) -> tuple[dict[str, TensorHeader], bytes]:
    """The header, after the library has checked it: sizes, order, no gaps, no overlaps, nothing past the end; and its
    digest."""
    try:
        with path.open("rb") as file:
            with safe_open(str(path), framework="np"):  # "pt" would map it as writable memory
                pass
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length)
        header: dict[str, Any] = msgspec.json.decode(text)
    except OSError as error:
        raise unreadable(path, error) from error
    except (SafetensorError, ValueError, msgspec.MsgspecError) as error:
        broken = CheckpointError(f"{path} is truncated or not safetensors ({error}): copy it again")
        raise lfs_pointer(path) or broken from error
    start = 8 + length
    header.pop("__metadata__", None)
    entries = {
        name: TensorHeader(e["dtype"], tuple(e["shape"]), start + e["data_offsets"][0], start + e["data_offsets"][1])
        for name, e in header.items()
    }
    return entries, hashlib.sha256(text).digest()
