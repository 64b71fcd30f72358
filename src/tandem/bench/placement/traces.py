"""Routing traces: which experts every token of a stream chose, int16 [tokens, layers, k], for measurements.

Generated ones are seeded and say what they assume; recorded ones (`load_trace`) are what a model did. In both a token's
k experts of a layer are distinct.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tandem.errors import ConfigError
from tandem.experts.usage.usage_file import load_plain

CHUNK_DRAWS = 1 << 22  # random numbers made at a time


@dataclass(frozen=True, slots=True)
class TraceShape:
    """Sizes of a trace: `top_k` of `experts` in each of `layers`, for `tokens` tokens."""

    tokens: int
    layers: int
    experts: int
    top_k: int


@dataclass(frozen=True, slots=True)
class Zipf:
    """Popularity that drifts. The expert of rank r is chosen in proportion to r ** -exponent, without repeats.

    Every layer has a ranking of its own, made from `model_seed`: what statistics of earlier traffic know. A request of
    `request_tokens` starts with that ranking, but `jump` of its places are shuffled. While it runs, `drift` of the
    places are shuffled every 100 tokens, a tenth of that every 10.

    The defaults are near what is published for real text. On 8000 tokens of 128 experts, top-8 (in brackets Qwen3-30B):

    - the most popular quarter serves 42 % of the stream (43 %)
    - a cache of an eighth by decayed counts serves 54 % (63 %)
    - 31 % of the most popular eighth change in 100 tokens (22 to 58 %)
    """

    exponent: float = 1.1
    jump: float = 0.7
    drift: float = 0.33
    request_tokens: int = 400
    model_seed: int = 0


UNIFORM = Zipf(exponent=0.0, jump=0.0, drift=0.0)
"""Every expert alike: nothing can be learnt."""
ADVERSARIAL = replace(Zipf(), jump=1.0, drift=0.0, request_tokens=100)
"""The whole popularity shuffled every 100 tokens: what was learnt is soon worthless."""
MILD = Zipf(exponent=0.7)
"""Less skewed, and it drifts as much."""
STEADY = replace(MILD, jump=0.2, drift=0.05)
"""As skewed as that, and what was learnt stays true for long."""
ROUTINGS = {"zipf": Zipf(), "mild": MILD, "steady": STEADY, "uniform": UNIFORM, "adversarial": ADVERSARIAL}

DRIFT_STEPS = 10  # tokens between two small shuffles


def generate(shape: TraceShape, law: Zipf, seed: int) -> Tensor:
    """int16 [tokens, layers, k]. Equal arguments give equal traces; another seed other requests to the same model."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.arange(1, shape.experts + 1, dtype=torch.float32) ** -law.exponent
    ranking = _Ranking(shape, law, generator)
    parts, done = [], 0
    while done < shape.tokens:
        count = min(DRIFT_STEPS, shape.tokens - done, law.request_tokens - done % law.request_tokens)
        parts.append(_draw(weights[ranking.at(done)], count, shape.top_k, generator))
        done += count
    return torch.cat(parts)


class _Ranking:
    """Every expert's rank, int64 [layers, experts], as the stream goes on."""

    def __init__(self, shape: TraceShape, law: Zipf, generator: torch.Generator) -> None:
        self._law, self._generator = law, generator
        model = torch.Generator().manual_seed(law.model_seed)
        self._first = torch.rand(shape.layers, shape.experts, generator=model).argsort(1)
        self._now = self._first

    def at(self, token: int) -> Tensor:
        if token % self._law.request_tokens == 0:
            self._now = self._shuffled(self._first, self._law.jump)
        else:
            self._now = self._shuffled(self._now, self._law.drift * DRIFT_STEPS / 100)
        return self._now

    def _shuffled(self, ranks: Tensor, share: float) -> Tensor:
        """`share` of each layer's experts, drawn anew, exchange their ranks among themselves at random."""
        count = round(share * ranks.shape[1])
        if count < 2:
            return ranks
        chosen = torch.rand(ranks.shape, generator=self._generator).topk(count).indices
        order = torch.rand(chosen.shape, generator=self._generator).argsort(1)
        return ranks.scatter(1, chosen, ranks.gather(1, chosen).gather(1, order))


def _draw(weights: Tensor, tokens: int, top_k: int, generator: torch.Generator) -> Tensor:
    """k experts without repeats, each in proportion to weights [layers, experts]: those that ring first, when each
    rings after an exponential time of rate `weight`."""
    at_once, parts = max(1, CHUNK_DRAWS // weights.numel()), []
    for first in range(0, tokens, at_once):
        times = torch.empty(min(at_once, tokens - first), *weights.shape)
        times.exponential_(generator=generator).div_(weights)
        parts.append(times.topk(top_k, largest=False).indices.to(torch.int16))
    return torch.cat(parts)


def expert_counts(trace: Tensor, experts: int) -> Tensor:
    """How often every expert was chosen: int64 [layers, experts]."""
    layers = trace.shape[1]
    first = torch.arange(layers)[:, None] * experts
    return torch.bincount((trace + first).flatten(), minlength=layers * experts).view(layers, experts)


def load_trace(path: str, shape: TraceShape) -> Tensor:
    """A recorded stream (`--expert-distribution-recorder-mode per_token`), repeated or cut to shape.tokens.

    The file: a tensor [tokens, layers, k], a dict with it as `topk_ids`, or one whose `records` hold
    `topk_ids_of_layer` [layers, tokens, k], as SGLang's do. Read without executing pickled code. Ids below 0 (padding)
    drop their token. Raises ConfigError.
    """
    trace = _joined(load_plain(path))
    if trace is None or trace.shape[1:] != (shape.layers, shape.top_k):
        content = (
            "no tokens" if trace is None else f"{trace.shape[1]} layers, {trace.shape[2]} experts per token"
        )
        needed = f"{shape.layers} layers, {shape.top_k} experts per token"
        raise ConfigError(f"--routing {path} holds {content}; the configuration has {needed}")
    trace = trace[(trace >= 0).flatten(1).all(1)]
    if not len(trace) or int(trace.max()) >= shape.experts:
        raise ConfigError(f"--routing {path} names experts past {shape.experts - 1}, or holds no token")
    return trace.repeat(-(-shape.tokens // len(trace)), 1, 1)[: shape.tokens].to(torch.int16)


def _joined(stored: object) -> Tensor | None:
    if isinstance(stored, dict) and "topk_ids" in stored:
        stored = stored["topk_ids"]
    if isinstance(stored, dict) and isinstance(stored.get("records"), list):
        records = [record.get("topk_ids_of_layer") for record in stored["records"] if isinstance(record, dict)]
        parts = [ids.transpose(0, 1) for ids in records if isinstance(ids, Tensor) and ids.dim() == 3]
        alike = len({part.shape[1:] for part in parts}) == 1
        return torch.cat(parts) if alike else None
    return stored if isinstance(stored, Tensor) and stored.dim() == 3 else None
