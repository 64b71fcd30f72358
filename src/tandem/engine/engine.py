"""`Engine`: the facade. `add` requests, call `step` while there is work, hand out what it returns."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Rows
from concurrent.futures import Future
from functools import partial
from time import perf_counter

from tandem.engine.answer import Answers
from tandem.engine.counters import Counters
from tandem.engine.expert_statistics import ExpertMeter, count_step, perform
from tandem.engine.gpu_runner import GpuRunner
from tandem.engine.grammar.waiting import GrammarQueue
from tandem.engine.limits import answer_limit, check_prompt_ids, validate
from tandem.engine.protocol import EngineStats, ExpertsRecorded, ExpertTraffic, GenerateRequest, TokenOutput
from tandem.engine.runners import layout_of, pace_of, runner_of, states_of, store_of
from tandem.engine.sampling.logits import Logits
from tandem.engine.sampling.logprobs import score_prompt
from tandem.engine.sampling.sampler import Sampled, fresh_seed
from tandem.engine.scheduler import Scheduler
from tandem.engine.sequence import Chunk, Sequence, masks_of, show
from tandem.engine.speculation.from_plan import speculation_of
from tandem.engine.speculation.speculation import Speculation
from tandem.engine.start.parts import EngineParts
from tandem.engine.state.kv_cache import KVCache
from tandem.engine.step.executor import Executor
from tandem.engine.step.overlap import PrefillOverlap, StepOverlap
from tandem.engine.step.step import (
    HasNewRequest,
    SequenceOutput,
    Step,
    StepOutput,
    StepResult,
    no_new_request,
    turns_of,
)
from tandem.engine.step.table_rows import admission, rows_ahead_of, unread
from tandem.engine.vision.encoder import Encoder, encoder_of
from tandem.engine.vision.spans import check_images
from tandem.errors import RequestError
from tandem.experts.usage.recorder import ExpertRecorder
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.free_memory import return_free_memory
from tandem.kernels.kernel_loads import kernel_loads
from tandem.kernels.unread_rows import unread_rows
from tandem.machine.memory_claims import memory_claims

_log = logging.getLogger(__name__)

_BAD_LOGITS = "the model returned NaN or infinite logits for this request"
_NO_TOKEN = (
    "no token can come next: min_tokens forbids all that the grammar of the answer allows, or the model returned NaN "
    "or infinite logits"
)


def _sequences(request: GenerateRequest, max_len: int, arrival: int, page_size: int) -> list[Sequence]:
    """Sequences of a request, one for each of its `n` answers."""
    requested_seed = request.sampling.seed
    seed = fresh_seed() if requested_seed is None else requested_seed
    return [
        Sequence(
            request.id, index, request.prompt_ids, request.sampling,
            arrival=arrival, max_len=max_len, page_size=page_size, seed=seed,
        )
        for index in range(request.sampling.n)
    ]  # fmt: skip


class Engine:
    """Not thread-safe: one thread adds, aborts and steps."""

    def __init__(self, config: EngineConfig) -> None:
        """Loads a model. Raises ConfigError or CheckpointError."""
        from tandem.engine.start.loader import load_parts  # the kernels are loaded only for a real model

        with memory_claims(config.model) as claims:
            self._assemble(load_parts(config, claims=claims))

    @classmethod
    def from_parts(cls, parts: EngineParts) -> Engine:
        engine = cls.__new__(cls)
        engine._assemble(parts)
        return engine

    def _assemble(self, parts: EngineParts) -> None:
        plan, tokenizer = parts.plan, parts.tokenizer
        assert tokenizer is not None, "an engine reads and writes text"
        self.plan, self.model_config, self.tokenizer = plan, parts.model_config, tokenizer
        self._workers, self._leader = parts.workers, parts.leader
        self._eos_ids = frozenset((*parts.model_config.eos_ids, *tokenizer.eos_ids))
        states = states_of(parts)
        self._kv = KVCache(plan.num_pages, plan.page_size, prefix_cache=plan.radix_cache)
        self._runner = runner_of(parts, states.arrays)
        self._rows_ahead = rows_ahead_of(parts)
        self._speculation = speculation_of(parts, states, self._kv)
        self._encoder = encoder_of(parts)
        self._scheduler = Scheduler(
            store_of(parts, self._kv, states.slots),
            max_step_tokens=plan.max_step_tokens,
            max_running=plan.max_running_requests,
            pace=pace_of(parts),
            proposer=self._speculation,
            on_admit=admission(parts, None if self._encoder is None else self._encoder.hand_to),
        )
        slotless = not layout_of(parts).slot_bytes
        # A draft layer runs between steps, where a pass may have its experts on the way. Nobody has shown yet that a
        # GPU changes a sequence's slot for graphs and a pass at once.
        self._may_pause = not plan.drafts and (slotless or plan.gpu is None)
        self._overlap = PrefillOverlap(self._scheduler, self._runner, slotless)
        return_free_memory()  # what loading and compiling took
        self._recorder = parts.recorder
        self._meter: ExpertMeter | None = None
        if parts.usage is not None:
            self._meter = ExpertMeter(parts.usage, parts.model_config.moe_layers, parts.handoff, parts.live)
        self.grammars = GrammarQueue(tokenizer, parts.model_config.vocab, self._eos_ids)
        self._notices: list[TokenOutput] = []  # outputs that no step made: aborts
        self._arrivals = 0
        self._counters = Counters()
        self._answers = Answers(self._scheduler, tokenizer, self._eos_ids, self._counters)

    def add(self, request: GenerateRequest) -> None:
        """Queues a request. Raises RequestError, and changes nothing, if it can never run; BusyError if not now."""
        if request.id in self._answers:
            raise RequestError(f"request id {request.id!r} is in use", "id")
        validate(request.sampling, self.model_config.vocab)
        check_prompt_ids(request.prompt_ids, self.model_config.vocab)
        check_images(request.images, request.prompt_ids, self.model_config.vision, self.plan.blind)
        max_len = answer_limit(request, self.plan.context_length, self._kv.num_pages * self._kv.page_size)
        self._arrivals += 1
        sequences = _sequences(request, max_len, self._arrivals, self._kv.page_size)
        show(sequences, request.images, self.model_config.vision)
        if request.sampling.grammar is None:
            self._scheduler.add(sequences)
        else:
            self.grammars.add(sequences, request.sampling.grammar)
        self._answers.begin(sequences)
        self._counters.prompt_tokens += len(request.prompt_ids)

    def close(self) -> None:
        """Ends what serves the engine beside it: the process that compiles grammars, the way to other ranks."""
        self.grammars.close()
        if self._leader is not None:
            self._leader.close()

    def abort(self, request_id: str) -> None:
        """Ends a request and frees its pages now; the next step reports "abort". "" means all; unknown ids are
        ignored. Raises EngineError where the GPU has stopped."""
        try:
            self._notices += self._answers.abort(request_id)
        except Exception:
            self._runner.after_failure()  # says that the GPU has stopped, where that is why
            raise

    def has_work(self) -> bool:
        return bool(self._answers or self._notices)

    def step(self, has_new_request: HasNewRequest = no_new_request) -> list[TokenOutput]:
        """Runs the model once for as many sequences as fit; returns what became of them. An error in here fails the
        requests of this step, with finish_reason "error", and leaves the others alone. Raises EngineError when no later
        step could work either; then the process has to end. has_new_request: a long step asks it, and shrinks."""
        outputs, self._notices = self._notices, []
        if self.grammars.waiting:
            outputs += self._take_grammars()
        started = perf_counter()
        recording = self._recorder is not None and self._recorder.recording
        pauses = self._may_pause and not recording
        if self._encoder is not None:
            self._encoder.hand_out(self._scheduler.running)
        chunks = self._scheduler.next(pauses, pipelines=not recording)
        if self._rows_ahead is not None:
            self._rows_ahead.of_prompts(chunks)
        drawing = perf_counter() - started  # of draft tokens
        decode_rows = self._scheduler.decode_rows
        if pauses and any(chunk.prefills for chunk in chunks[decode_rows:]):
            chunks = self._overlap.take(chunks)
        prefill = self._step_overlap(chunks, pauses)
        step = Step(tuple(chunks), self._shared_tokens(chunks) if pauses else 0, has_new_request, decode_rows)
        step_outputs = self._run(step, prefill, drawing) if chunks else []
        outputs += [*([] if prefill is None else prefill.outputs), *step_outputs]
        if self._encoder is not None:
            outputs += self._encoded(self._encoder, not chunks and prefill is None, prefill is not None)
        if self.grammars.waiting and not (chunks or outputs or prefill is not None or self._encodes):
            self.grammars.wait()
        return outputs

    def _step_overlap(self, chunks: list[Chunk], pauses: bool) -> StepOverlap | None:
        """The work of the prefill task under way in this step, if there is one. It is done now, unless a device is to
        compute the step meanwhile."""
        if not self._scheduler.in_flight:
            return None
        prefill = self._overlap.step_overlap(chunks, partial(self._tried, counts=False), pauses)
        if not prefill.overlaps:
            prefill()
        return prefill

    @property
    def _encodes(self) -> bool:
        return self._encoder is not None and self._encoder.under_way

    def _encoded(self, encoder: Encoder, idle: bool, prefilled: bool) -> list[TokenOutput]:
        """A slice of an image; outputs of those whose image cannot be read. prefilled: a prompt had one, too."""
        seconds = self._scheduler.pace.slice_seconds(encoder.pace.share_behind(prefilled))
        failed = encoder.go_on(self._scheduler.running, seconds, idle)
        if failed:
            _log.error("an image of %d answers was not read: %s", len(failed), failed[0][1])
            self._runner.after_failure()
        return [self._answers.fail(sequence, error) for sequence, error in failed]

    def _shared_tokens(self, chunks: Rows[Chunk]) -> int:
        """Rows that a step of one chunk may shrink to. 0: layers keep of a sequence what cannot be computed again, or
        it has no more rows than that."""
        gpu = self.plan.gpu
        shared = gpu.sizes.shared_tokens if gpu is not None and gpu.sizes.prompt_sizes else 0
        return shared if len(chunks) == 1 and chunks[0].length > shared else 0

    def _run(self, step: Step, prefill: StepOverlap | None, drawing: float) -> list[TokenOutput]:
        """The seconds that it takes tell the pace and the governor of drafts."""
        started, has_prefill = perf_counter(), step.has_prefill
        outcome = self._tried(step.chunks, partial(self._computed, step, prefill))
        seconds = perf_counter() - started - (0.0 if prefill is None else prefill.overtook)
        delay = 0.0 if self._encoder is None else self._encoder.pace.delay()
        if delay:  # drawing comes first, and so waits first
            seconds, drawing = max(0.0, seconds - max(0.0, delay - drawing)), max(0.0, drawing - delay)
        _tell(self._speculation, outcome.turns, seconds + drawing)
        if has_prefill:
            self._scheduler.pace.observe(outcome.num_tokens, seconds, step.chunks[0].num_verified == 1)  # 0: it failed
        else:
            self._scheduler.pace.decoded(seconds, overlapped=prefill is not None or delay > 0)
        self._counters.steps += 1
        self._counters.step_seconds += seconds + drawing
        return outcome.outputs

    def _computed(self, step: Step, prefill: StepOverlap | None) -> StepOutput:
        """The step, and meanwhile a slice of the prefill task where a device computes."""
        overlaps = prefill is not None and prefill.overlaps
        with self._runner.start(step, overlaps) as running:
            if prefill is not None and overlaps:
                prefill()
            return running.result()

    def _tried(self, chunks: Rows[Chunk], run: Callable[[], StepOutput | None], counts: bool = True) -> StepResult:
        """Outputs of these chunks; none while `run` has no result yet. An error fails them all, whatever it was: the
        engine goes on. counts: it is a step of its own."""
        try:
            output = run()
            return StepResult([], []) if output is None else self._committed(output, counts)
        except Exception as error:
            _log.exception("a step of %d sequences failed", len(chunks))
            self._runner.after_failure()
            if self._recorder is not None:
                self._recorder.after_failure()
            return StepResult([self._answers.fail(chunk.sequence, error) for chunk in chunks], [])

    def flush_cache(self) -> int:
        """Forgets all cached prefixes that no running request uses; returns the number of pages freed."""
        return self._kv.flush()

    def record_experts(self, action: str) -> Future[ExpertsRecorded]:
        """action "start", "stop" or "dump" (`ExpertRecorder`). The future has a RequestError or EngineError instead."""
        return perform(self._recorder, action)

    def expert_traffic(self) -> ExpertTraffic:
        """For the live map; empty for a dense model."""
        return ExpertTraffic() if self._meter is None else self._meter.traffic(idle=not self.has_work())

    @property
    def gpu_runner(self) -> GpuRunner:
        """Where steps run on a GPU."""
        assert isinstance(self._runner, GpuRunner)
        return self._runner

    def stats(self) -> EngineStats:
        c, scheduler = self._counters, self._scheduler
        parked = sum(len(s.siblings) for s in (*scheduler.running, *scheduler.waiting))
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + parked + len(self.grammars),
            pages_total=self._kv.num_pages,
            pages_free=self._kv.available,
            pages_cached=self._kv.idle,
            prompt_tokens=c.prompt_tokens,
            cached_tokens=c.cached_tokens,
            generated_tokens=c.generated_tokens,
            finished_requests=c.finished_requests,
            aborted_requests=c.aborted_requests,
            preemptions=scheduler.preemptions,
            steps=c.steps,
            step_seconds=c.step_seconds,
            images=0 if self._encoder is None else self._encoder.images,
            image_seconds=0.0 if self._encoder is None else self._encoder.seconds,
            late_kernels=kernel_loads.late,
            experts=None if self._meter is None else self._meter.stats(idle=not self.has_work()),
            speculation=None if self._speculation is None else self._speculation.stats(),
        )

    def _take_grammars(self) -> list[TokenOutput]:
        """Requests whose grammars are compiled may run; outputs of those whose cannot be."""
        outputs: list[TokenOutput] = []
        for sequences, error in self.grammars.ready():
            if error is None:
                self._scheduler.add(sequences)
            else:
                outputs += [self._answers.refuse(sequence, error) for sequence in sequences]
        return outputs

    def _committed(self, output: StepOutput, counts: bool) -> StepResult:
        turns, logits = list(turns_of(output.step.chunks)), output.logits
        for turn in turns:
            if turn.sequence.scores_prompt:
                score_prompt(turn.chunk, logits.fetched(slice(turn.row + 1 - turn.chunk.logits, turn.row + 1)))
        active = [turn for turn in turns if turn.chunk.samples or self._commit(turn, None)]
        while active:  # once, and again for those whose draft token is accepted
            tokens = self._chosen(logits, active)
            active = [turn for turn, sampled in zip(active, tokens, strict=False) if self._commit(turn, sampled)]
        if self._rows_ahead is not None:
            self._rows_ahead.of_answers(turns)
        _count(turns, self._meter, self._recorder if counts else None)
        if counts:
            _commit_rows(self._runner, turns)
        return StepResult([out for turn in turns if (out := turn.output) is not None], turns, output.step.num_tokens)

    def _chosen(self, logits: Logits, turns: list[SequenceOutput]) -> list[Sampled]:
        """The next token of each. If that fails, they end, and nothing is chosen: others may have got theirs."""
        sequences = [turn.sequence for turn in turns]
        try:
            rows = [turn.row for turn in turns]
            return logits.chosen(rows, sequences, self._eos_ids, masks_of(sequences))
        except Exception as error:
            _log.exception("no token could be chosen for %d sequences", len(turns))
            self._runner.after_failure()
            for turn in turns:
                turn.end(self._answers.fail(turn.sequence, error))
            return []

    def _commit(self, turn: SequenceOutput, sampled: Sampled | None) -> bool:
        """True: its next token can be chosen in this step, too. sampled: None where the prompt goes on."""
        try:
            return self._advance(turn, sampled)
        except Exception as error:  # of this answer alone: the others of the step have their tokens
            _log.exception("request %s failed after its step", turn.sequence.request_id)
            turn.end(self._answers.fail(turn.sequence, error))
            return False

    def _advance(self, turn: SequenceOutput, sampled: Sampled | None) -> bool:
        sequence = turn.sequence
        answer = self._answers.of(sequence)
        message = unread(turn) if unread_rows.first_by_slot else ""
        if not message and sampled is not None and sampled.token_id < 0:
            message = _why_no_token(sequence)
        if message:
            turn.end(self._answers.end(sequence, answer.end("error", message), keep=False))
            return False
        if turn.tokens:
            self._scheduler.accept(sequence)
        else:
            self._scheduler.advance(turn.chunk)
        if sampled is None:
            return False
        output = answer.push(sampled)
        self._counters.generated_tokens += 1
        if output.completion_tokens == 1 and sequence.index == 0:
            self._counters.cached_tokens += output.cached_tokens
        return turn.take(sampled.token_id, self._answers.end(sequence, output) if output.finish_reason else output)


def _why_no_token(sequence: Sequence) -> str:
    if sequence.matcher is not None:
        sequence.matcher.check()
    message = _BAD_LOGITS if sequence.matcher is None else _NO_TOKEN
    return message + (f"; it may be that {unread_rows.last}" if unread_rows.last else "")


def _count(turns: list[SequenceOutput], meter: ExpertMeter | None, recorder: ExpertRecorder | None) -> None:
    """For statistics: what goes wrong here costs nobody an answer."""
    try:
        count_step(meter, recorder, turns)
    except Exception:
        _log.exception("a step was not counted")


def _commit_rows(executor: Executor, turns: list[SequenceOutput]) -> None:
    """Likewise, unless the GPU has stopped: then it raises EngineError."""
    try:
        executor.commit(sum([turn.rows for turn in turns]))
    except Exception:
        _log.exception("experts may stay where they are: a step's rows were not counted")
        executor.after_failure()


def _tell(draft_tokens: Speculation | None, turns: list[SequenceOutput], seconds: float) -> None:
    """Tells the speculation how a step went, in seconds. An error costs nobody an answer: it is logged."""
    try:
        if draft_tokens is not None:
            draft_tokens.ran(turns, seconds)
    except Exception:
        _log.exception("nothing was learnt from a step's drafts")
