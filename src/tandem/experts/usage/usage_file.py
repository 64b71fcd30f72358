"""Files of recorded expert usage: what the recorder writes, and what --init-expert-location and `kt stats` read.

Ours is a dict of plain tensors, numbers and texts, saved by torch and loaded without executing pickled code. SGLang's
files of the same names are read, too: `logical_count` (its modes stat and stat_approx) and `records` (the others).
"""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.errors import ConfigError


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """Recorded usage. The tensors after `layers` are there only where the mode has them."""

    counts: Tensor  # integers or floats [passes, layers, experts]: tokens routed to the expert
    mode: str = "stat"
    model: str = ""
    tokens: int = 0  # tokens in all
    passes: int = 0  # steps in all; more than len(counts) where they were added up or too many to keep
    layers: tuple[int, ...] = ()  # decoder layers of the counts; (): not known
    gpu_experts: Tensor | None = None  # bool [layers, experts] at the end, or [passes, layers, experts]
    pass_tokens: Tensor | None = None  # int32 [passes]
    topk_ids: Tensor | None = None  # int16 [tokens, layers, top_k], all passes one after the other
    requests: Tensor | None = None  # int32 [tokens]: numbers in the order of arrival
    positions: Tensor | None = None  # int32 [tokens]

    @property
    def total(self) -> Tensor:
        """float64 [layers, experts]."""
        return self.counts.double().sum(0)


_TENSORS = ("pass_tokens", "topk_ids", "requests", "positions")


def write_usage(path: Path, record: UsageRecord) -> None:
    """Under another name first, then renamed: a file of this name is complete. Raises OSError."""
    buffer = io.BytesIO()
    torch.save(_stored(record), buffer)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _stored(record: UsageRecord) -> dict[str, Any]:
    small = not record.counts.is_floating_point() and int(record.counts.max()) < 2**31
    stored: dict[str, Any] = {
        "logical_count": record.counts.int() if small else record.counts,
        "mode": record.mode, "model": record.model, "rank": 0, "tokens": record.tokens, "passes": record.passes,
        "moe_layers": torch.tensor(record.layers, dtype=torch.int32),
    }  # fmt: skip
    optional = {name: getattr(record, name) for name in _TENSORS} | {"gpu_experts": record.gpu_experts}
    return stored | {name: tensor for name, tensor in optional.items() if tensor is not None}


def read_usage(path: str | Path) -> UsageRecord:
    """Ours, SGLang's, or a bare tensor [.., layers, experts]. Raises ConfigError."""
    stored = load_plain(path)
    if isinstance(stored, dict) and _is_detailed(stored.get("records")):
        return _detailed(path, stored)
    logical_count = stored.get("logical_count") if isinstance(stored, dict) else stored
    counts = _checked(path, logical_count)
    return _described(path, counts, stored) if isinstance(stored, dict) else UsageRecord(counts)


def load_plain(path: str | Path) -> Any:
    """Contents of a file that torch.save wrote, without executing pickled code. Raises ConfigError."""
    try:
        return torch.load(Path(path), map_location="cpu", weights_only=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # what torch says of it ends in the advice to execute the file
        raise ConfigError(
            f"{path} cannot be read: it is no file of torch.save, or holds more than tensors, numbers and texts"
        ) from error


def _is_detailed(records: object) -> bool:
    return isinstance(records, list) and all(isinstance(record, dict) for record in records)


def _checked(path: str | Path, counts: object) -> Tensor:
    if not isinstance(counts, Tensor) or counts.dim() < 2 or counts.numel() == 0:
        what = list(counts.shape) if isinstance(counts, Tensor) else type(counts).__name__
        raise ConfigError(
            f"{path} holds {what}; expected counts as a tensor [.., layers, experts] or a dict with it as logical_count"
        )
    if (
        counts.is_complex()
        or not bool((counts.double() >= 0).all())
        or not bool(counts.double().isfinite().all())
    ):
        raise ConfigError(f"{path} holds counts that are negative or no numbers")
    return counts.reshape(-1, *counts.shape[-2:])


def _described(path: str | Path, counts: Tensor, stored: dict[str, Any]) -> UsageRecord:
    """With what else the file says, as far as it fits."""
    layers, gpu_experts = stored.get("moe_layers"), stored.get("gpu_experts")
    ids = layers.tolist() if isinstance(layers, Tensor) and layers.shape == counts.shape[1:2] else ()
    if isinstance(gpu_experts, Tensor) and gpu_experts.shape[-2:] != counts.shape[-2:]:
        raise ConfigError(f"{path}: gpu_experts is {list(gpu_experts.shape)}, logical_count {list(counts.shape)}")
    tensors = {name: t for name in _TENSORS if isinstance(t := stored.get(name), Tensor)}
    return UsageRecord(
        counts, str(stored.get("mode", "stat")), str(stored.get("model", "")), int(stored.get("tokens", 0)),
        int(stored.get("passes", 0)), tuple(ids), gpu_experts if isinstance(gpu_experts, Tensor) else None, **tensors,
    )  # fmt: skip


def _detailed(path: str | Path, stored: dict[str, Any]) -> UsageRecord:
    """SGLang's per_pass and per_token: counts of physical experts of every pass, and which logical ones these are."""
    records, place = stored["records"], stored.get("last_physical_to_logical_map")
    counts = [c for r in records if isinstance(c := r.get("global_physical_count"), Tensor)]
    if not isinstance(place, Tensor) or place.dim() != 2 or place.numel() == 0 or not counts:
        raise ConfigError(f"{path} holds records without counts of experts (global_physical_count)")
    if any(c.shape != place.shape for c in counts) or int(place.min()) < 0:
        raise ConfigError(f"{path}: last_physical_to_logical_map does not fit the records")
    physical = torch.stack(counts).long()
    index = place.long().expand(len(counts), -1, -1)
    logical = torch.zeros(*physical.shape[:2], int(place.max()) + 1, dtype=torch.int64)
    return UsageRecord(
        _checked(path, logical.scatter_add_(2, index, physical)), "per_pass", passes=len(counts)
    )
