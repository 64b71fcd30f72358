"""Requests to an engine and its outputs, in one process or over a socket (msgspec structs)."""

from __future__ import annotations

from typing import Literal

import msgspec

from tandem.engine.sampling.parameters import Grammar as Grammar
from tandem.engine.sampling.parameters import GrammarKind as GrammarKind
from tandem.engine.sampling.parameters import SamplingFields as SamplingFields
from tandem.engine.sampling.parameters import SamplingSettings as SamplingSettings
from tandem.engine.vision.spans import ImageSpan


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    """One prompt, `sampling.n` answers. `id` is unique while the request lives. images: in the order of their rows."""

    id: str
    prompt_ids: list[int]
    sampling: SamplingSettings
    images: tuple[ImageSpan, ...] = ()


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """Stop a request and free its pages now. Unknown ids are ignored; id "" aborts all."""

    id: str


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One chosen token, its natural-log probability, and the top alternatives as (id, logprob)."""

    token_id: int
    logprob: float | None  # None for the first prompt token, which nothing predicts
    top: list[tuple[int, float]] = []


class FirstToken(msgspec.Struct, frozen=True, array_like=True):
    """Times until an answer's first token, in seconds."""

    queue: float  # from the request until it ran; a grammar is compiled meanwhile
    prefill: float  # from then on; with what a preemption cost


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True, tag="output", omit_defaults=True):
    """Addition of one step to one answer. `text` is final: held back while a stop string may still match."""

    id: str
    index: int  # which of the n answers
    text: str
    token_ids: list[int]
    lengths: list[int] | None = None  # of several tokens: characters that each added to `text`
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None  # once, with the first output of index 0
    finish_reason: str | None = None  # None | "stop" | "length" | "abort" | "error"
    stop_match: str | int | None = None  # the stop string or token id that matched
    error: str | None = None  # with finish_reason "error"
    refused: str | None = None  # with an error that the request made: the field that is wrong
    prompt_tokens: int = 0
    completion_tokens: int = 0  # of this answer so far
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    first_token: FirstToken | None = None  # once, with the first token


class RecordExperts(msgspec.Struct, frozen=True, kw_only=True, tag="record_experts"):
    """Start, stop or write the record of which experts are used; answered by one `ExpertsRecorded`."""

    action: Literal["start", "stop", "dump"]


class ExpertsRecorded(msgspec.Struct, frozen=True, kw_only=True, tag="experts_recorded"):
    """State of the expert recording, and its counts: of the file, if one was written."""

    recording: bool = False
    mode: str = ""
    passes: int = 0
    tokens: int = 0
    file: str | None = None
    error: str | None = None
    fault: str | None = None  # with an error, whose it is: "request" or "engine"


class LookAtExperts(msgspec.Struct, frozen=True, kw_only=True, tag="look"):
    """Ask for the traffic of each expert; answered by one `ExpertTraffic`."""


class ExpertTraffic(msgspec.Struct, frozen=True, kw_only=True, tag="traffic"):
    """Where each routed expert lives, and the tokens it got since start. All empty: a dense model. The arrays are
    bytes, as they lie in memory: making lists of them would take the engine longer than reading them."""

    layers: list[int] = []  # decoder layers
    experts: int = 0  # of a layer
    tokens: bytes = b""  # int64 [layers, experts], little-endian
    gpu_experts: bytes = b""  # 0 or 1 [layers, experts]


class ExpertStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of routed tokens since start: lists have an entry for each MoE layer. A token counts once for each expert
    it was routed to. Bytes are those of expert weights, counted once per step and expert that was used."""

    layers: list[int]  # decoder layers
    gpu_tokens: list[int]
    cpu_tokens: list[int]
    gpu_bytes: list[int]
    cpu_bytes: list[int]
    hit_rate: float = 0.0  # share of the tokens whose expert was on the GPU
    swaps: int = 0  # experts that came to the GPU while serving
    swap_rests: int = 0  # how often all went back because it did not pay
    swap_seconds: float = 0.0  # of the engine's thread for swaps and deciding on them
    swap_wait_seconds: float = 0.0  # of these, what the GPU may have waited for
    handoff_posts: int = 0  # batches that the GPU handed to the CPU
    handoff_wait_seconds: float = 0.0  # the CPU waited for them
    handoff_serve_seconds: float = 0.0  # the CPU computed them
    hinted: int = 0  # experts in CPU memory that were foreseen, each once per batch and layer
    hint_hits: int = 0  # of those, that were used
    hint_bytes: int = 0  # of foreseen experts that were fetched before they were computed


_JSON_NAMES = {
    "draft_steps": "guess_steps", "draft_step_tokens": "guess_step_tokens",
    "draft_tokens": "guesses", "accepted_tokens": "right_guesses",
}  # fmt: skip
"""Names in `/get_server_info`: dashboards read them, so they stay."""


class SpeculationStats(msgspec.Struct, frozen=True, kw_only=True, rename=_JSON_NAMES):
    """Gains of draft tokens since start. Only steps without prompts are meant."""

    algorithm: str
    governed: bool  # whether each step has as many draft tokens as pay
    most: int  # draft tokens of a sequence in a step
    steps: int = 0
    draft_steps: int = 0  # those that had draft tokens
    draft_step_tokens: int = 0  # what all sequences got in these
    draft_tokens: int = 0
    accepted_tokens: int = 0
    widths: list[int] = []  # how often a sequence had 0, 1, … draft tokens in a step
    saved_seconds: float = 0.0  # of steps, beside what the same tokens would have taken without drafts
    believed_seconds: list[float] = []  # of a step like the last, by draft tokens of each sequence; empty: unknown
    believed_chances: list[float] = []  # that a draft token is accepted if those before it are, by kind: the governor's


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """A snapshot of counters and gauges, for /metrics and /get_server_info."""

    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_free: int = 0  # free or only held by the prefix cache, i.e. available
    pages_cached: int = 0  # held only by the prefix cache
    prompt_tokens: int = 0  # totals since start
    cached_tokens: int = 0
    generated_tokens: int = 0
    finished_requests: int = 0
    aborted_requests: int = 0
    preemptions: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    images: int = 0  # that the tower has read
    image_seconds: float = 0.0  # that the tower computed them
    late_kernels: int = 0  # of a GPU, compiled or loaded from a cache after the engine was ready
    experts: ExpertStats | None = None  # None: a dense model
    speculation: SpeculationStats | None = None  # None: nothing is drafted
