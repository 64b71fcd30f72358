"""`Answer`: a sequence with its text; turns each chosen token into a `TokenOutput` and decides when to stop. `Answers`:
of all requests, and how they end.
"""

from __future__ import annotations

from collections.abc import Collection
from time import perf_counter

import msgspec

from tandem.engine.counters import Counters
from tandem.engine.failures import why
from tandem.engine.limits import refused_grammar
from tandem.engine.protocol import FirstToken, TokenLogprob, TokenOutput
from tandem.engine.sampling.sampler import Sampled
from tandem.engine.scheduler import Scheduler
from tandem.engine.sequence import Sequence, Status
from tandem.errors import RequestError
from tandem.text.detokenizer import Decoder, TextStream


class Answer:
    def __init__(self, sequence: Sequence, decoder: Decoder, eos_ids: Collection[int]) -> None:
        self.sequence = sequence
        self._stream = TextStream(decoder, sequence.tokens, sequence.sampling)
        self._ids = self._stream.ids
        params = sequence.sampling
        self._end_ids = frozenset((*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)))

    def push(self, sampled: Sampled) -> TokenOutput:
        """One more token. The output's `finish_reason` says whether it was the last."""
        sequence, token_id = self.sequence, sampled.token_id
        sequence.append(token_id)
        logprobs = None if sampled.logprob is None else [sampled.logprob]
        if token_id in self._end_ids:
            return self._end_with_token(token_id, logprobs)
        if self._ids is not None:
            text = self._ids.push(token_id)
        else:
            may_stop = sequence.answer_len > sequence.sampling.min_tokens
            text, stop = self._stream.push(token_id, may_stop=may_stop)
            if stop:
                return self._output(text, [token_id], logprobs, "stop", stop)
        if len(sequence.tokens) == sequence.max_len or (sequence.matcher is not None and sequence.grammar_ended):
            rest = self._stream.finish()
            complete = rest.stop is not None or sequence.grammar_ended
            return self._output(text + rest.text, [token_id], logprobs, "stop" if complete else "length", rest.stop)
        return self._output(text, [token_id], logprobs)

    def end(self, reason: str, error: str | None = None) -> TokenOutput:
        """Ends without a further token; text held back is given out, where it can be had."""
        try:
            text = self._stream.finish().text
        except Exception:  # perhaps why it ends
            text = ""
        return self._output(text, [], None, reason, None, error)

    def _end_with_token(self, token_id: int, logprobs: list[TokenLogprob] | None) -> TokenOutput:
        """The end token's text belongs to the answer only if the request says so."""
        text, stop = "", None
        if self.sequence.sampling.include_stop:
            text, stop = self._stream.push(token_id)
        if stop is None:
            rest = self._stream.finish()
            text, stop = text + rest.text, rest.stop
        return self._output(text, [token_id], logprobs, "stop", token_id if stop is None else stop)

    def _output(
        self,
        text: str,
        token_ids: list[int],
        logprobs: list[TokenLogprob] | None,
        reason: str | None = None,
        stop: str | int | None = None,
        error: str | None = None,
    ) -> TokenOutput:
        sequence = self.sequence
        answer_len = len(sequence.tokens) - sequence.prompt_len
        first = answer_len == 1 and bool(token_ids)
        return TokenOutput(
            id=sequence.request_id,
            index=sequence.index,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=(sequence.prompt_logprobs or None) if first else None,
            finish_reason=reason,
            stop_match=stop,
            error=error,
            prompt_tokens=sequence.prompt_len,
            completion_tokens=answer_len,
            cached_tokens=sequence.cached_prompt_len,
            first_token=_first_token(sequence) if first else None,
        )


def _first_token(sequence: Sequence) -> FirstToken:
    started = sequence.started_at
    return FirstToken(started - sequence.arrived_at, perf_counter() - started)


class Answers:
    """Answers of the requests that have not ended, by request id. One that is ended here frees its pages at once."""

    def __init__(
        self, scheduler: Scheduler, decoder: Decoder, eos_ids: Collection[int], counters: Counters
    ) -> None:
        self._scheduler, self._decoder, self._eos_ids, self._counters = scheduler, decoder, eos_ids, counters
        self._of: dict[str, list[Answer]] = {}

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._of

    def begin(self, sequences: list[Sequence]) -> None:
        """Those of one request."""
        answers = [Answer(sequence, self._decoder, self._eos_ids) for sequence in sequences]
        self._of[sequences[0].request_id] = answers

    def of(self, sequence: Sequence) -> Answer:
        return self._of[sequence.request_id][sequence.index]

    def end(self, sequence: Sequence, output: TokenOutput, *, keep: bool = True) -> TokenOutput:
        """output: its last. keep: what its pages hold is sound."""
        self._scheduler.finish(sequence, keep=keep)
        if not self._open(sequence.request_id):
            del self._of[sequence.request_id]
            self._counters.finished_requests += 1
        return output

    def fail(self, sequence: Sequence, error: Exception) -> TokenOutput:
        return self.end(sequence, self.of(sequence).end("error", why(error)), keep=False)

    def refuse(self, sequence: Sequence, error: Exception) -> TokenOutput:
        """Its grammar cannot be had."""
        output = self.of(sequence).end("error", refused_grammar(error))
        if isinstance(error, RequestError):
            output = msgspec.structs.replace(output, refused="grammar")
        return self.end(sequence, output, keep=False)

    def abort(self, request_id: str) -> list[TokenOutput]:
        """All of a request, or of all with ""."""
        names = list(self._of) if request_id == "" else [request_id]
        answers = {name: self._open(name) for name in names}
        for answer in (answer for each in answers.values() for answer in each):
            self._scheduler.finish(answer.sequence)
        for name in names:
            self._of.pop(name, None)
        self._counters.aborted_requests += sum(map(bool, answers.values()))
        return [answer.end("abort") for each in answers.values() for answer in each]

    def _open(self, request_id: str) -> list[Answer]:
        return [a for a in self._of.get(request_id, ()) if a.sequence.status is not Status.FINISHED]
