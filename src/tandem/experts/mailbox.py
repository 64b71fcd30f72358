"""`Mailbox`: mapped memory through which CUDA graphs ask for the CPU's experts, and the thread that answers."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from tandem import _core
from tandem.errors import EngineError
from tandem.experts.deferral import Deferral
from tandem.experts.handoff_counts import HandoffSizes, HandoffTimes, PrefetchCounts
from tandem.experts.mailbox_kernels import GAVE_UP, kernels
from tandem.kernels.cpu import PackedExperts
from tandem.kernels.gpu.nvrtc import launch
from tandem.kernels.ops import Routing

POST_THREADS, COLLECT_THREADS, HINT_THREADS = 1024, 512, 64
UNITS_PER_BLOCK = 1024  # of 16 bytes, of the answer: more blocks would only poll


class Mailbox:
    """Mapped memory, the kernels around it, and the CPU's end of it.

    Stages on several GPUs have a mailbox each, all of them the same memory with one end on the CPU. Posts are counted
    through all stages, so the count follows a step from GPU to GPU (`take_over`).
    """

    def __init__(
        self,
        sizes: HandoffSizes,
        device: torch.device,
        layers: list[PackedExperts],
        patience: float,
        first: Mailbox | None = None,
    ) -> None:
        """first: of the first stage, whose memory this one uses."""
        # Before a capture: compiling and loading a module may allocate and synchronise.
        self._kernels = kernels(device.index)
        shape = (sizes.mailbox_tokens, sizes.hidden, sizes.top_k, sizes.deferred)
        *self._at, size = _core.mailbox_offsets(*shape)
        self._sizes, self._device, self._patience = sizes, device, patience
        if first is None:
            # Pinned memory is mapped into every GPU's address space at the same address (unified addressing).
            self._memory = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
            self.core = _core.Mailbox(self._memory.numpy(), *shape)
            for layer in layers:
                self.add(layer)
            self.thread = _core.PostThread(self.core)
            self._all = [self]
        else:
            self._memory, self.core, self.thread, self._all = first._memory, first.core, first.thread, first._all
            self._all.append(self)
        self._words = self._memory.numpy().view(np.uint32)
        self._state = self._counts(device)  # posts so far; whether the GPU gave up
        self.posted: list[int] = []
        self.rows: Tensor | None = None
        self.last = -1

    def _counts(self, device: torch.device) -> Tensor:
        """Those of the stages before on the same GPU, or new ones."""
        same = (each._state for each in self._all if each is not self and each._device == device)
        return next(same, torch.zeros(2, dtype=torch.int32, device=device))

    def take_over(self, before: Mailbox) -> None:
        """Before this stage's graph, or the next step's, in the order of what both GPUs were given: posts are counted
        on from that stage."""
        if self._state is not before._state:
            self._state.copy_(before._state, non_blocking=True)

    def add(self, layer: PackedExperts) -> None:
        self.core.add(layer.core)

    def defer(self, layer: int, deferral: Deferral) -> None:
        self.core.defer(layer, deferral.kept, deferral.routed)

    def _half(self, post: int) -> int:
        """Bytes to the half that a graph's post lies in."""
        return post % 2 * int(self._at[5])

    def _rows(self) -> int:
        """Address of the number of real rows; 0: all are."""
        return 0 if self.rows is None else self.rows.data_ptr()

    def post(self, layer: int, x: Tensor, routing: Routing, slots: Tensor) -> None:
        tokens, hidden = x.shape
        if tokens > self._sizes.mailbox_tokens or slots.shape[1] != self._sizes.top_k or hidden % 8:
            raise EngineError(
                f"the mailbox does not take {list(x.shape)} tokens with {slots.shape[1]} experts"
            )
        index = len(self.posted)
        mail_x, mail_ids, mail_weights, *_ = (at + self._half(index) for at in self._at)
        base = self._memory.data_ptr()
        flags = (_core.SECOND_HALF if index % 2 else 0) | (_core.LAST_POST if layer == self.last else 0)
        numbers = [np.int32(n) for n in (tokens, hidden // 8, slots.shape[1], layer, flags)]
        launch(
            self._kernels[0], 1, POST_THREADS, self._stream(), base, self._state.data_ptr(), x.data_ptr(),
            routing.ids.data_ptr(), slots.data_ptr(), routing.weights.data_ptr(), base + mail_x, base + mail_ids,
            base + mail_weights, self._rows(), *numbers,
        )  # fmt: skip
        self.posted.append(layer)

    def collect(self, tokens: int) -> Tensor:
        out = torch.empty(tokens, self._sizes.hidden, device=self._device)
        base, patience = self._memory.data_ptr(), np.uint64(self._patience * 1e9)
        answer = base + self._at[3] + self._half(len(self.posted) - 1)
        launch(
            self._kernels[1], -(-out.numel() // 4 // UNITS_PER_BLOCK), COLLECT_THREADS, self._stream(), base,
            self._state.data_ptr(), answer, out.data_ptr(), self._rows(), np.int32(tokens),
            np.int32(self._sizes.hidden // 4), patience,
        )  # fmt: skip
        return out

    def prefetch(self, layer: int, routing: Routing) -> None:
        each = routing.ids.shape[1]
        assert routing.slots is not None and each <= self._sizes.top_k
        base, numbers = self._memory.data_ptr(), [np.int32(n) for n in (routing.ids.numel(), each, layer)]
        launch(
            self._kernels[2], 1, HINT_THREADS, self._stream(), base, self._state.data_ptr(),
            routing.ids.data_ptr(), routing.slots.data_ptr(), base + self._at[4], *numbers,
        )  # fmt: skip

    def hints(self) -> PrefetchCounts:
        return PrefetchCounts(self.core.hinted, self.core.hits, self.core.bytes_ahead)

    def finish(self) -> None:
        try:
            self.thread.finish()
        except Exception as error:
            self._recover()
            raise EngineError(f"the experts in CPU memory failed: {error}") from error

    def cancel(self) -> None:
        if self.core.is_open:
            self.thread.cancel()
            with suppress(EngineError):
                self.finish()

    def check(self) -> None:
        """Patience may end in the last `collect`, while the CPU computes: it answers and sees nothing of it."""
        if self._words[GAVE_UP]:
            self._recover()
            raise EngineError(
                f"the experts in CPU memory took longer than {self._patience:g} s: the GPU has given up"
            )

    def _recover(self) -> None:
        self._synchronize()  # ends within the kernels' patience
        for each in self._all:
            each._state.zero_()
        self._synchronize()
        self.core.reset()

    def _synchronize(self) -> None:
        for device in {each._device for each in self._all if each._device.type == "cuda"}:
            torch.cuda.synchronize(device)

    def used(self) -> tuple[int, int]:
        return self.core.posts, self.core.experts_used

    def times(self) -> HandoffTimes:
        return HandoffTimes(self.core.posts, self.core.wait_seconds, self.core.serve_seconds)

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)
