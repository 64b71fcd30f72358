"""`Answer`: a sequence with its text; turns each chosen token into a `TokenOutput` and decides when to stop."""

from __future__ import annotations

from collections.abc import Collection
from time import perf_counter

from tandem.engine.protocol import FirstToken, TokenLogprob, TokenOutput
from tandem.engine.sampling.sampler import Sampled
from tandem.engine.sequence import Sequence
from tandem.engine.text.detokenizer import Decoder, TextStream


class Answer:
    def __init__(self, sequence: Sequence, decoder: Decoder, eos_ids: Collection[int]) -> None:
        self.sequence = sequence
        self._stream = TextStream(decoder, sequence.tokens, sequence.sampling)
        self._eos_ids = eos_ids

    def push(self, sampled: Sampled) -> TokenOutput:
        """One more token. The output's `finish_reason` says whether it was the last."""
        sequence = self.sequence
        sequence.append(sampled.token_id)
        logprobs = None if sampled.logprob is None else [sampled.logprob]
        if self._is_end_token(sampled.token_id):
            return self._end_with_token(sampled.token_id, logprobs)
        piece = self._stream.push(
            sampled.token_id, may_stop=sequence.answer_len > sequence.sampling.min_tokens
        )
        text, stop, reason = piece.text, piece.stop, "stop" if piece.stop else None
        if reason is None and (sequence.grammar_ended or sequence.total_len == sequence.max_len):
            rest = self._stream.finish()
            complete = rest.stop is not None or sequence.grammar_ended
            text, stop, reason = text + rest.text, rest.stop, "stop" if complete else "length"
        return self._output(text, [sampled.token_id], logprobs, reason, stop)

    def end(self, reason: str, error: str | None = None) -> TokenOutput:
        """Ends without a further token; text held back is given out."""
        return self._output(self._stream.finish().text, [], None, reason, None, error)

    def _is_end_token(self, token_id: int) -> bool:
        params = self.sequence.sampling
        return token_id in params.stop_token_ids or (token_id in self._eos_ids and not params.ignore_eos)

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
        reason: str | None,
        stop: str | int | None,
        error: str | None = None,
    ) -> TokenOutput:
        sequence = self.sequence
        first = sequence.answer_len == 1 and bool(token_ids)
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
            completion_tokens=sequence.answer_len,
            cached_tokens=sequence.cached_prompt_len,
            first_token=_first_token(sequence) if first else None,
        )


def _first_token(sequence: Sequence) -> FirstToken:
    started = sequence.started_at
    return FirstToken(started - sequence.arrived_at, perf_counter() - started)
