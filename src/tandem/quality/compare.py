"""Runs a reference and everything that is measured against it through the layers side by side, then compares logits.

Layer by layer, the reference's layer moves its own hidden states on, and each measured layer its own. To see what this
layer alone does, it also moves those that the reference had before it. No two layers are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tandem.errors import ConfigError
from tandem.models.model import finished
from tandem.quality.measures import (
    Divergence,
    KeptRows,
    divergences,
    kept_rows,
    losses,
    perplexity,
    top_tokens,
)
from tandem.quality.saved_logits import LogitsWriter, SavedLogits
from tandem.quality.stream import LayerStream
from tandem.quality.text import Windows
from tandem.spec.model_config import ModelConfig

ROWS_PER_CHUNK = 64  # of logits at a time: 64 x 150,000 in float64 are 77 MB

Progress = Callable[[str, int, int], None]  # what is being done, steps done, steps in all


@dataclass(frozen=True, slots=True)
class LayerError:
    """Errors of hidden states, each token's relative to the size of the reference's state, mean over tokens.

    own: of this layer alone, given the reference's input. total: after this layer, with all before it measured, too.
    kl: KL(reference ‖ model in which only this layer is the measured one), where that was asked for.
    """

    layer: int
    own: float
    total: float
    kl: float | None = None


@dataclass(frozen=True, slots=True)
class CandidateResult:
    """One candidate's result; `divergence` and `layers` only beside a reference."""

    label: str
    format: str
    perplexity: float
    divergence: Divergence | None = None
    layers: tuple[LayerError, ...] = ()


@dataclass(slots=True)
class Candidate:
    """Something that is measured. `one_layer_off[i]`: hidden states of the reference but for its layer i."""

    label: str
    stream: LayerStream
    errors: list[LayerError] = field(default_factory=list)
    one_layer_off: list[Tensor] = field(default_factory=list)


class OutputHead:
    """Final norm and output matrix of a stream."""

    def __init__(self, stream: LayerStream) -> None:
        self.eps, self._device, self._config = stream.config.norm.eps, stream.device, stream.config
        (self.end, self.norm), self.matrix = stream.final_norm(), stream.head()

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden], or of several streams → float32 [n, vocab], both in CPU memory."""
        with torch.inference_mode():
            normed = self.end.peek(hidden.to(self._device), self.norm, self.eps)
            return finished(self.matrix(normed, torch.float32).cpu(), self._config)


@dataclass(slots=True)
class Sums:
    """Sums over the rows of one candidate."""

    loss: list[Tensor] = field(default_factory=list)
    kl: list[Tensor] = field(default_factory=list)
    same_top: list[Tensor] = field(default_factory=list)

    def add(self, logits: Tensor, targets: Tensor, reference: KeptRows | None) -> None:
        self.loss.append(losses(logits, targets))
        if reference is not None:
            self.kl.append(divergences(reference, logits))
            self.same_top.append(logits.argmax(-1) == top_tokens(reference))

    @property
    def perplexity(self) -> float:
        return perplexity(torch.cat(self.loss))

    @property
    def divergence(self) -> Divergence | None:
        return Divergence.of(torch.cat(self.kl), torch.cat(self.same_top)) if self.kl else None


class Comparison:
    """A reference (a stream, saved logits, or none) and candidates over the same windows."""

    def __init__(
        self,
        windows: Windows,
        reference: LayerStream | SavedLogits | None,
        candidates: list[Candidate],
        *,
        layer_kl: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.windows, self.candidates, self.layer_kl = windows, candidates, layer_kl
        self.reference = reference if isinstance(reference, LayerStream) else None
        self.saved = reference if isinstance(reference, SavedLogits) else None
        self._report = progress or (lambda _what, _done, _total: None)
        self._done, self._what = 0, ""
        self._check_shapes()

    def run(self, writer: LogitsWriter | None = None, keep: int = 0) -> tuple[float | None, list[CandidateResult]]:
        """(the reference's perplexity, one result per candidate). `writer` is given the reference's rows, the `keep`
        largest logits of each (0: all)."""
        for index in range(len(self._first.config.layers)):
            self._what = f"layer {index + 1}/{len(self._first.config.layers)}"
            self._layer(index)
        self._what = "logits"
        return self._compare_logits(writer, keep)

    @property
    def _first(self) -> LayerStream:
        return self.reference or self.candidates[0].stream

    def _check_shapes(self) -> None:
        ours = _sizes(self._first.config)
        for candidate in self.candidates:
            theirs = _sizes(candidate.stream.config)
            for name, size in ours.items():
                if size != theirs[name]:
                    raise ConfigError(
                        f"{candidate.label} has {theirs[name]} {name}, the reference {size}: "
                        "layers can only be compared one by one; use --save-logits and --reference-logits"
                    )

    # -- layers ---

    def _layer(self, index: int) -> None:
        before = self._advance_reference(index)
        for candidate in self.candidates:
            self._advance_candidate(candidate, index, before)

    def _advance_candidate(self, candidate: Candidate, index: int, before: Tensor | None) -> None:
        """before: the reference's hidden states."""
        stream = candidate.stream
        layer = stream.layer(index)
        stream.advance(layer, stream.hidden, self._tick, stream.owed)
        if self.reference is not None and before is not None:
            own = before.to(stream.hidden.dtype, copy=True)
            stream.advance(layer, own, self._tick)
            self._record(candidate, index, own)

    def _advance_reference(self, index: int) -> Tensor | None:
        """The reference's hidden states before its layer; None without a reference."""
        reference = self.reference
        if reference is None:
            return None
        before, layer = reference.hidden.clone(), reference.layer(index)
        reference.advance(layer, reference.hidden, self._tick)
        for candidate in self.candidates:
            for hidden in candidate.one_layer_off:
                reference.advance(layer, hidden, self._tick)
        return before

    def _record(self, candidate: Candidate, index: int, own: Tensor) -> None:
        assert self.reference is not None
        truth = self.reference.hidden
        errors = (relative_error(own, truth), relative_error(candidate.stream.hidden, truth))
        candidate.errors.append(LayerError(index, *errors))
        if self.layer_kl:
            candidate.one_layer_off.append(own.to(truth.dtype))

    # -- logits ---

    def _compare_logits(self, writer: LogitsWriter | None, keep: int) -> tuple[float | None, list[CandidateResult]]:
        heads = self._heads()
        base, sums = Sums(), [Sums() for _ in self.candidates]
        lone_sums = [[Sums() for _ in candidate.one_layer_off] for candidate in self.candidates]
        for first, rows in self._chunks():
            targets = self.windows.tokens[rows + 1]
            truth = self._reference_rows(heads, first, rows, targets, base)
            if writer is not None and truth is not None:
                writer.append(kept_rows(truth.logits, targets, keep))
            for candidate, head, total, own_sums in zip(self.candidates, heads[1:], sums, lone_sums, strict=True):
                total.add(head.logits(candidate.stream.hidden[rows]), targets, truth)
                for hidden, each in zip(candidate.one_layer_off, own_sums, strict=True):
                    each.add(heads[0].logits(hidden[rows]), targets, truth)
            self._tick()
        results = [_result(*each) for each in zip(self.candidates, sums, lone_sums, strict=True)]
        return (base.perplexity if base.loss else None), results

    def _chunks(self) -> Iterator[tuple[int, Tensor]]:
        """(index of the first prediction, rows) of each chunk."""
        for first in range(0, len(self.windows.predicting), ROWS_PER_CHUNK):
            yield first, self.windows.predicting[first : first + ROWS_PER_CHUNK]

    def _reference_rows(
        self, heads: list[OutputHead], first: int, rows: Tensor, targets: Tensor, base: Sums
    ) -> KeptRows | None:
        if self.saved is not None:
            saved = self.saved.rows(first, first + len(rows))
            base.loss.append(saved.log_total - saved.target.double())
            return saved
        if self.reference is None:
            return None
        logits = heads[0].logits(self.reference.hidden[rows])
        base.loss.append(losses(logits, targets))
        return kept_rows(logits, targets)

    def _heads(self) -> list[OutputHead]:
        """The reference's (or the first candidate's), then one per candidate; equal ones are the same object."""
        by_kind: dict[tuple[object, ...], OutputHead] = {}

        def head(stream: LayerStream) -> OutputHead:
            key = (stream.variant.directory, stream.plan.dtype, stream.plan.tier, stream.device)
            if key not in by_kind:
                by_kind[key] = OutputHead(stream)
            return by_kind[key]

        return [head(self._first), *(head(candidate.stream) for candidate in self.candidates)]

    # -- progress ---

    @property
    def steps(self) -> int:
        """Windows through layers, and chunks of logits."""
        layers, count = len(self._first.config.layers), len(self.candidates)
        runs = layers * (count + (1 + count if self.reference is not None else 0))
        if self.layer_kl:
            runs += count * layers * (layers - 1) // 2
        return runs * len(self.windows.ids) + -(-len(self.windows.predicting) // ROWS_PER_CHUNK)

    def _tick(self) -> None:
        self._done += 1
        self._report(self._what, self._done, self.steps)


def _result(candidate: Candidate, sums: Sums, lone_sums: list[Sums]) -> CandidateResult:
    layers = tuple(candidate.errors)
    if lone_sums:
        kls = [float(torch.cat(each.kl).mean()) for each in lone_sums]
        layers = tuple(LayerError(e.layer, e.own, e.total, kl) for e, kl in zip(layers, kls, strict=True))
    return CandidateResult(
        candidate.label, candidate.stream.plan.expert_format, sums.perplexity, sums.divergence, layers
    )


def relative_error(got: Tensor, truth: Tensor) -> float:
    """Mean over rows of |got - truth| / |truth|."""
    exact = truth.float()
    error = (got.float() - exact).norm(dim=-1) / exact.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    return float(error.mean())


def _sizes(config: ModelConfig) -> dict[str, int]:
    return {"layers": len(config.layers), "hidden": config.hidden, "vocab": config.vocab}
