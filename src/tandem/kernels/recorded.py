"""Steps that the C++ core does again without Python: see csrc/bindings/recording.h."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tandem import _core
from tandem.kernels.batch_layout import KernelBatch
from tandem.kernels.batch_views import Refill

# Calls of torch that may be left out when a step is repeated: they only name memory, which the recording keeps.
_ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty")


def _is_view(func: Any, result: Any, args: tuple[Any, ...]) -> bool:
    """True if `result` is memory of the first argument, seen otherwise and not written."""
    if func._schema.is_mutable or not isinstance(result, Tensor) or not isinstance(args[0], Tensor):
        return False
    return result.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()


class OnlyAllocations(TorchDispatchMode):
    """Notes which calls of torch do more than allocate. `others`: their names."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.others: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled. Else the first call would import torch._dynamo, a fifth of a start's CPU time."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        name = func.overloadpacket.__name__
        if name not in _ALLOCATIONS and not _is_view(func, result, args):
            self.others.append(name)
        return result


class RecordedStep:
    """A recording with what changes from call to call: its input, and its batch's indices."""

    def __init__(self, recording: _core.Recording, x: Tensor, result: Tensor, refill: Refill) -> None:
        self._recording, self._x, self._result, self._refill = recording, x, result, refill

    def __call__(self, x: Tensor, batch: KernelBatch) -> Tensor:
        """Raises KernelError when an index points outside the cache."""
        self._refill(batch)
        self._x.copy_(x)
        self._recording.run()
        return self._result
