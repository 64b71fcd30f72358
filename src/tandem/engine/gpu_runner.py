"""`GpuRunner`: runs steps on a GPU; decode steps as one CUDA graph per number of rows, CPU experts included."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import torch
from torch import Tensor

from tandem.engine.cpu_runner import StepModel
from tandem.engine.graphs.decode_graphs import DecodeCapture, DecodeGraph, nothing_collected
from tandem.engine.graphs.inputs import GraphPlan
from tandem.engine.graphs.pool import GraphPool
from tandem.engine.graphs.prefill_graphs import PrefillCapture, PrefillGraph
from tandem.engine.sampling.graph_masks import GraphMasks
from tandem.engine.sampling.logits import BestRows, DeviceLogits, HostRows, StepEnd
from tandem.engine.sampling.masks import RowMasks, TokenMask
from tandem.engine.sequence import Chunk, make_masks, places_of
from tandem.engine.step.batch import BatchArrays, StepShape, moved, regions
from tandem.engine.step.hooks import BeginStep, StepHooks, nothing_begins
from tandem.engine.step.path import Choice, Path, background_path_of, background_with_cpu, path_of
from tandem.engine.step.prefill import (
    GpuPlace,
    LayerPieces,
    PausingModel,
    PrefillPieces,
    PrefillTask,
    in_layers,
)
from tandem.engine.step.step import Running, ShrinkingStep, Step, StepOutput
from tandem.engine.step.streams import LaunchThread, Streams
from tandem.errors import EngineError
from tandem.experts.handoff import Handoff
from tandem.experts.live.live_experts import LiveExperts
from tandem.experts.usage.expert_usage import ExpertUsage
from tandem.models.batch import ForwardBatch

_log = logging.getLogger(__name__)


def _on(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _masks(chunks: Rows[Chunk]) -> RowMasks:
    """Places of the masks of a step's rows, if it may be replayed. The mask behind a draft token is known when that is
    accepted; rows before a prompt's last one choose nothing."""
    masks = places_of([chunk.sequence for chunk in chunks])
    if not masks or all(chunk.logits == 1 for chunk in chunks):
        return masks
    return [each for mask, chunk in zip(masks, chunks, strict=True) for each in _masks_of(chunk, mask)]


def _masks_of(chunk: Chunk, mask: TokenMask | None) -> RowMasks:
    after = len(chunk.draft_tokens)
    return [*[None] * (chunk.logits - 1 - after), mask, *[None] * after]


def _begun(batch: ForwardBatch, begin: BeginStep, device: torch.device) -> ForwardBatch:
    """A batch that is computed kernel by kernel, where the device reads it."""
    device_batch = moved(batch, device)  # first: a copy would wait behind those of experts
    begin(batch, False)
    return device_batch


def _nothing() -> None:
    """Where masks are made before the step, and where nothing is done beside it."""


@contextmanager
def _or_else(let_end: Callable[[], None]) -> Iterator[None]:
    """Around what follows a replay; let_end: called where it fails, before anything else."""
    try:
        yield
    except BaseException:
        let_end()
        raise


class GpuRunner:
    """A step whose rows are all decode rows and fit a graph is replayed; others run kernel by kernel. A row of a draft
    token is a decode row, too (`BatchArrays`).

    A batch smaller than its graph is filled up with copies of its last row: they compute and write the same. Kernels
    that change what a sequence keeps in its slot know copies by their slot, 0, and give them the last row's result.
    """

    def __init__(
        self,
        model: StepModel,
        states: list[tuple[Tensor, ...]],
        handoff: Handoff,
        graphs: GraphPlan,
        shape: StepShape,
        *,
        usage: ExpertUsage | None = None,
        live: LiveExperts | None = None,
        begin_step: StepHooks | None = None,
    ) -> None:
        """begin_step: called before the layers of a step run, and before a graph is captured (True) or replayed. None:
        nothing is prepared, and no prefill is overtaken by steps."""
        self._model, self._states, self._handoff, self._plan = model, states, handoff, graphs
        self._usage, self._live, self._start = usage, live, begin_step
        self._begin_step: BeginStep = begin_step or nothing_begins
        arrays = partial(
            BatchArrays, *shape, speculative=graphs.speculative, windowed=graphs.windowed,
            each_row=graphs.each_row,
        )  # fmt: skip
        self._device = handoff.device
        own, paused = regions(graphs.images_from, shape.max_tokens)
        self._arrays = arrays(row_per_sequence=True, images_from=own)
        self._paused = arrays(pinned=self._device.type == "cuda", images_from=paused)
        self._speculative = False  # whether the last step had rows of draft tokens that are not settled yet
        self._rows, self._best = HostRows(handoff.device), BestRows(shape.max_tokens, handoff.device)
        self._end = StepEnd(handoff.device)
        self._graphs = GraphPool()
        pauses = self._start is not None and self._start.pausable() and not graphs.drafting
        overlaps, self._takes_turns = pauses and not graphs.one_stream, pauses and graphs.turns
        self._streams = Streams(handoff.device, overlaps, graphs.reserved_sms if graphs.prompts else 0)
        self._launcher = LaunchThread(partial(_on, self._device)) if overlaps else None
        self._streams.enter()
        with torch.inference_mode(), nothing_collected():
            self._graphs.capture_decode(graphs, self._decode_capture())
            self._capture_prompts()

    @property
    def device(self) -> torch.device:
        """GPU that chooses tokens, the current one of the thread that runs steps."""
        return self._device

    def start(self, step: Step, overlaps: bool = False) -> Running[StepOutput]:
        """Starts a step, as `Executor.start`. A graph is replayed here, and the CPU does its part; other steps are
        computed when their result is wanted."""
        batch = self._arrays.fill(step.chunks)
        self._speculative = step.has_drafts
        make = partial(make_masks, [chunk.sequence for chunk in step.chunks])
        shrinking = ShrinkingStep(step) if step.shrinks and isinstance(self._model, PausingModel) else None
        running = self._start_batch(batch, _masks(step.chunks), make, overlaps, shrinking)
        return running.then(lambda logits: StepOutput(step if shrinking is None else shrinking.step, logits))

    @contextmanager
    def unseen(self, model: StepModel) -> Iterator[None]:
        """Meanwhile steps are this model's, and neither counted nor followed by exchanges of experts."""
        before = self._model, self._usage, self._live
        if self._usage is not None:
            with torch.inference_mode():
                self._usage.begin(0)
        self._model, self._usage, self._live = model, None, None
        try:
            yield
        finally:
            self._model, self._usage, self._live = before

    def run_kernels(self, chunks: Rows[Chunk], streamed: Rows[int] = ()) -> DeviceLogits:
        """As `run`, kernel by kernel, whatever graphs there are. streamed: layers whose experts are streamed."""
        with torch.inference_mode(), self._streams.side_stream():
            batch = self._arrays.fill(chunks)
            device_batch = moved(batch, self._device)
            if self._start is None:
                self._begin_step(batch, False)
            else:
                self._start.load_kernels(batch, streamed)
            logits = self._forward(device_batch, len(batch.input_ids))
            best = self._best.fetch(logits)
            self._end.mark()
            return self._done(logits, best)

    def commit(self, tokens: int) -> None:
        """The last step's rows were so many tokens, and nothing else is counted any more."""
        if self._speculative and self._live is not None:
            self._live.after_step(self._end.passed)
        self._speculative = False

    def after_failure(self) -> None:
        """Raises EngineError when the GPU cannot go on: after an illegal access or a memory error every later call
        fails, too, and only a new process helps."""
        if self._device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self._device)
        except Exception as error:
            raise EngineError(f"the GPU stopped working: {error}") from error

    def logits(
        self,
        batch: ForwardBatch,
        masks: RowMasks = (),
        make: Callable[[], None] = _nothing,
        host_work: Callable[[], None] = _nothing,
        shrinking: ShrinkingStep | None = None,
    ) -> DeviceLogits:
        """A batch, started and ended. masks: of each row's next token, where it is known; `make` makes them, while the
        GPU computes. They count where a graph is replayed; `DeviceLogits.chosen` wants them anyway. host_work: called
        between the two."""
        with self._start_batch(batch, masks, make, host_work is not _nothing, shrinking) as running:
            host_work()
            return running.result()

    def _start_batch(
        self,
        batch: ForwardBatch,
        masks: RowMasks,
        make: Callable[[], None],
        overlaps: bool,
        shrinking: ShrinkingStep | None,
    ) -> Running[DeviceLogits]:
        choice = path_of(batch, self._graphs, shrinks=shrinking is not None)
        choice.log(len(batch.input_ids))
        if choice.decode is not None:
            return self._replayed(choice.decode, batch, masks, make, overlaps)
        if choice.prefill is not None:
            return Running(partial(self._prefilled, choice, batch, make))
        return Running(partial(self._eager, batch, make, shrinking))

    def _replayed(
        self,
        graph: DecodeGraph,
        batch: ForwardBatch,
        masks: RowMasks,
        make: Callable[[], None],
        overlaps: bool,
    ) -> Running[DeviceLogits]:
        """A replayed graph. The CPU has answered its posts; the GPU may still compute."""
        rows, masked, feeding = batch.seq_lens.shape[0], bool(masks), ExitStack()
        let_end = partial(self._let_end, graph, self._handoff.finish)
        with torch.inference_mode():
            self._replay(graph, batch, masks)
            with _or_else(let_end):
                # Before any call of the driver: it may wait for what waits for the masks.
                graph.masks.make(make) if masked else make()
                self._end.mark()
                self._move_experts()
            with _or_else(feeding.close), _or_else(let_end):
                if overlaps and self._launcher is not None:
                    feeding.enter_context(self._launcher.opened())  # until the GPU has ended, too
                self._handoff.finish()

        def finish() -> DeviceLogits:
            with feeding, torch.inference_mode():
                graph_masks = graph.masks if masked else None
                return self._done(graph.logits[:rows], graph.best[:rows], graph_masks, masks)

        def cancel() -> None:
            with feeding:
                let_end()

        return Running(finish, cancel)

    def _replay(self, graph: DecodeGraph, batch: ForwardBatch, masks: RowMasks) -> None:
        try:
            self._handoff.begin(graph.posts)  # first: who answers needs a while to wake up
            graph.inputs.fill(batch)
            if masks or graph.masks.sent:
                graph.masks.send(masks)
            self._begin_step(graph.inputs.image, True)
            graph.graph.replay()
        except BaseException:  # it may have begun
            self._let_end(graph, self._handoff.cancel)
            raise

    def _let_end(self, graph: DecodeGraph, answer: Callable[[], None]) -> None:
        """A graph that runs gets its masks and its experts. It would wait, and take those of the next step."""
        graph.masks.make(_nothing)
        with suppress(EngineError):
            answer()
        self._end.mark()
        self._end.wait()

    def _eager(
        self, batch: ForwardBatch, make: Callable[[], None], shrinking: ShrinkingStep | None = None
    ) -> DeviceLogits:
        """Kernel by kernel, while no task is under way."""
        with torch.inference_mode(), self._streams.side_stream():
            device_batch = _begun(batch, self._begin_step, self._device)
            logits = self._forward(device_batch, len(batch.input_ids), shrinking)
            best = self._best.fetch(logits)
            self._end.mark()
            make()
        if self._live is not None:
            self._streams.join()  # exchanges write in the order of the first stream
        self._move_experts()
        return self._done(logits, best)

    def _prefilled(
        self, choice: Choice[DecodeGraph, PrefillGraph], batch: ForwardBatch, make: Callable[[], None]
    ) -> DeviceLogits:
        """Prompts in the graph of their path, while no task is under way."""
        task = self.paused(batch, choice.prefill, choice.path is Path.SHARED_PREFILL_GRAPH)
        assert task is not None, "graphs of prompts are captured only where passes can pause"
        with torch.inference_mode(), _or_else(task.drop):  # or later steps would find it under way
            task.go_on(0.0, whole=True)
            make()
            logits = task.logits()
        assert isinstance(logits, DeviceLogits)
        return logits

    def pause(self, chunks: list[Chunk]) -> PrefillTask | None:
        """A task of these chunks; one at a time."""
        return self.paused(self._paused.fill(chunks))

    def paused(
        self, batch: ForwardBatch, graph: PrefillGraph | None = None, split: bool = False
    ) -> PrefillTask | None:
        """A task beside which graphs are replayed. None: this model cannot stop, or its operations keep something that
        steps change. The batch is in host memory, and stays as it is. graph: of it, if nothing is replayed beside it;
        split: the CPU has a part in that."""
        start = self._start
        if start is None or not (self._streams.steps or self._takes_turns) or not isinstance(self._model, PausingModel):
            return None
        choice = background_path_of(batch, self._graphs) if graph is None else None
        reserve_sms = choice is not None and choice.prefill is not None
        # A graph that runs now writes nothing that this task reads, so the task does not wait for it. Pieces of images
        # were put together on that stream, and experts have changed places there.
        after = choice is None or batch.image_rows is not None or (self._live is not None and self._live.settling)
        with torch.inference_mode(), self._streams.side_stream(after, reserve_sms):
            try:
                gpu_only = start.begin_task(batch, split)
                if choice is not None:
                    choice = choice if gpu_only else background_with_cpu()
                    choice.log(len(batch.input_ids))
                    graph = choice.prefill
                pieces = self._pieces(batch, self._model, graph)
            except BaseException:
                start.end_task()
                raise
        place = GpuPlace(start, self._streams, self._usage, self._rows, reserve_sms)
        return PrefillTask(pieces, place, self._launcher if gpu_only and isinstance(pieces, LayerPieces) else None)

    def _pieces(self, batch: ForwardBatch, model: PausingModel, graph: PrefillGraph | None) -> PrefillPieces:
        tallies = None if self._usage is None else self._usage.overlap_tallies(len(batch.input_ids))
        if graph is not None:
            return graph.of(batch)
        best = BestRows(len(batch.logits_rows), self._device)
        return LayerPieces(model, self._states, moved(batch, self._device), tallies, best)

    def step_ended(self) -> bool:
        return self._end.passed()

    def runs_beside(self, chunks: list[Chunk]) -> bool:
        """Only what is replayed."""
        return self._graphs.runs_beside_prefill(len(chunks)) and all(chunk.length == 1 for chunk in chunks)

    def _done(
        self,
        logits: Tensor,
        best: Tensor,
        graph_masks: GraphMasks | None = None,
        masked: RowMasks = (),
    ) -> DeviceLogits:
        """Ends the step: so its time is known, and the pinned images are free again. The CPU has done its part, so
        experts may change places while the GPU does the rest of its own: their copies come after it. After rows of
        draft tokens they wait until rejected ones are no longer counted (`commit`)."""
        if self._live is not None and not self._speculative:
            self._live.after_step(self._end.passed)
        device_logits = DeviceLogits(logits, best, self._rows, masked=[mask is not None for mask in masked])
        self._end.wait()
        self._handoff.check()
        if graph_masks is not None:
            graph_masks.check()
        return device_logits

    def _move_experts(self) -> None:
        """Beside a step that was started."""
        if self._live is not None:
            self._live.beside_step()

    def _forward(
        self, batch: ForwardBatch, counted: int | Tensor, shrinking: ShrinkingStep | None = None
    ) -> Tensor:
        """counted: how many of the first rows `ExpertUsage` counts."""
        if self._usage is not None:
            self._usage.begin(counted)
        if shrinking is None or not isinstance(self._model, PausingModel):
            return self._model.forward(batch, self._states)
        return in_layers(
            self._model, batch, self._states, shrinking,
            lambda step: _begun(self._arrays.fill(step.chunks), self._begin_step, self._device),
        )  # fmt: skip

    def _decode_capture(self) -> DecodeCapture:
        return DecodeCapture(
            self._plan, self._device, self._handoff, self._streams, self._begin_step, self._forward
        )

    def _capture_prompts(self) -> None:
        """Captures graphs of prefill chunks, where steps can overtake them."""
        self._graphs.capture_prefill(
            self._plan,
            PrefillCapture(
                self._model, self._states, self._plan.pages, self._start, self._streams, self._device, self._usage,
                self._plan.images_from > 0,
            ),
        )
