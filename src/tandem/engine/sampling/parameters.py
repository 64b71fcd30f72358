"""The table of sampling parameters, a line each. Those that a model may recommend are `SamplingSettings`' and stand in
`engine/offline/input.py`, too; a GGUF file's are named in `checkpoint/gguf_config.py`.

A line has the name, the type, the default and a `Parameter`: the range, where it is computed, and the dialects. What
comes from it: bodies of requests (`server/sampling_bodies.py`), checks (`engine/limits.py`), which defaults a model may
recommend (`engine/start/sampling_defaults.py`) and the table in docs/http.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

import msgspec

MAX_ANSWERS = 128
MAX_LOGPROBS = 100
INF = math.inf

GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]


class Grammar(msgspec.Struct, frozen=True):
    """Constraint that an answer must match, from its first token to its last; `engine/grammar/sources.py` makes them.

    `text` is a JSON schema, a regular expression, a grammar in GBNF (its rule `root`), or a structural tag of xgrammar
    (JSON).
    """

    kind: GrammarKind
    text: str
    lenient: bool = False  # what cannot be held to is left out instead of refused


class Dialect(StrEnum):
    OPENAI = "OpenAI"  # chats and text completions
    SGLANG = "/generate"
    OLLAMA = "Ollama"  # in `options`
    ANTHROPIC = "Anthropic"
    RESPONSES = "/v1/responses"


class Place(StrEnum):
    """Where a parameter is computed, if the logits are on a GPU; the cheapest first."""

    NOWHERE = "–"  # no logit depends on it
    GPU = "GPU"  # over all tokens of a row
    BEST = "best"  # on the CPU, among the most probable tokens of a row, where these decide
    ROW = "row"  # on the CPU, for which the whole row is copied


class Bounds(NamedTuple):
    """inclusive: the lowest value itself is allowed."""

    lowest: float
    highest: float
    inclusive: bool = True


class Parameter(NamedTuple):
    """names: in dialects that have another name for it. by_route: a route converts its value, or has a default of its
    own; else bodies get the field, and its value goes to the engine as it is."""

    range: Bounds | None
    place: Place
    dialects: frozenset[Dialect]
    names: Mapping[Dialect, str] = {}
    by_route: bool = False

    def name_in(self, dialect: Dialect, name: str) -> str:
        """The dialect's name of the parameter that is called `name` here."""
        return self.names.get(dialect, name)


NOWHERE, GPU, BEST, ROW = Place
OPENAI, SGLANG, OLLAMA, ANTHROPIC, RESPONSES = Dialect
ALL = frozenset(Dialect)
BOTH = frozenset({OPENAI, SGLANG})
THREE = BOTH | {OLLAMA}
NONE = frozenset[Dialect]()


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters whose defaults are the same for all models; `SamplingSettings` has the others.

    `logit_bias` maps token id to an addend. `logprobs` = number of top alternatives to report per token (0: only the
    chosen one), None: none. Fields without a `Parameter` are no client's: routes make them.
    """

    max_tokens: Annotated[
        int | None,
        Parameter(
            Bounds(1, INF), NOWHERE, ALL,
            {SGLANG: "max_new_tokens", OLLAMA: "num_predict", RESPONSES: "max_output_tokens"}, by_route=True,
        ),
    ] = None  # up to the context length
    min_tokens: Annotated[int, Parameter(Bounds(0, INF), ROW, BOTH, {SGLANG: "min_new_tokens"})] = 0
    xtc_probability: Annotated[float, Parameter(Bounds(0.0, 1.0), BEST, BOTH)] = 0.0  # with which XTC acts on a token
    xtc_threshold: Annotated[float, Parameter(Bounds(0.0, 1.0), BEST, BOTH)] = 0.1
    dry_multiplier: Annotated[float, Parameter(Bounds(0.0, 100.0), ROW, BOTH)] = 0.0  # 0: no DRY
    dry_base: Annotated[float, Parameter(Bounds(1.0, 100.0), ROW, BOTH)] = 1.75
    dry_allowed_length: Annotated[int, Parameter(Bounds(1, 2**31), ROW, BOTH)] = 2
    dry_penalty_last_n: Annotated[int, Parameter(Bounds(-1, INF), ROW, BOTH)] = -1  # tokens that DRY looks at; -1: all
    dry_breakers: Annotated[
        tuple[int, ...], Parameter(None, ROW, BOTH, dict.fromkeys(BOTH, "dry_sequence_breakers"), by_route=True)
    ] = ()  # tokens that a repetition does not reach over
    presence_penalty: Annotated[float, Parameter(Bounds(-100.0, 100.0), ROW, THREE)] = 0.0
    frequency_penalty: Annotated[float, Parameter(Bounds(-100.0, 100.0), ROW, THREE)] = 0.0
    seed: Annotated[
        int | None, Parameter(Bounds(-(2**63), 2**64 - 1), NOWHERE, THREE, {SGLANG: "sampling_seed"})
    ] = None
    logit_bias: Annotated[dict[int, float], Parameter(None, ROW, BOTH, by_route=True)] = {}
    stop: Annotated[
        tuple[str, ...],
        Parameter(None, NOWHERE, THREE | {ANTHROPIC}, {ANTHROPIC: "stop_sequences"}, by_route=True),
    ] = ()
    stop_token_ids: Annotated[tuple[int, ...], Parameter(None, NOWHERE, BOTH, by_route=True)] = ()
    include_stop: Annotated[
        bool, Parameter(None, NOWHERE, BOTH, dict.fromkeys(BOTH, "no_stop_trim"), by_route=True)
    ] = False  # keep the matched stop string in the text
    ignore_eos: Annotated[bool, Parameter(None, NOWHERE, BOTH)] = False
    skip_special_tokens: Annotated[bool, Parameter(None, NOWHERE, BOTH)] = True
    n: Annotated[int, Parameter(Bounds(1, MAX_ANSWERS), NOWHERE, BOTH)] = 1
    logprobs: Annotated[int | None, Parameter(Bounds(0, MAX_LOGPROBS), BEST, NONE, by_route=True)] = None
    prompt_logprobs: Annotated[int | None, Parameter(Bounds(0, MAX_LOGPROBS), ROW, NONE, by_route=True)] = None
    show_tokens: tuple[int, ...] = ()  # special tokens that are not skipped: a parser needs their text
    grammar: Grammar | None = None
    grammar_prefix: str = ""  # what the prompt ends with, and the grammar has to match before the answer


class SamplingSettings(SamplingFields, frozen=True, kw_only=True):
    """How tokens are chosen and when to stop. `validate` (engine/limits.py) checks the ranges.

    The fields here are those that a model's generation_config.json may recommend. temperature 0 is greedy. top_k 0 or
    -1 means all.
    """

    temperature: Annotated[float, Parameter(Bounds(0.0, 100.0), GPU, ALL)] = 1.0
    top_p: Annotated[float, Parameter(Bounds(0.0, 1.0, inclusive=False), BEST, ALL)] = 1.0
    top_k: Annotated[int, Parameter(Bounds(-1, INF), BEST, THREE | {ANTHROPIC})] = 0
    min_p: Annotated[float, Parameter(Bounds(0.0, 1.0), GPU, THREE)] = 0.0
    typical_p: Annotated[float, Parameter(Bounds(0.0, 1.0, inclusive=False), BEST, THREE)] = 1.0
    # below 0.01 logits leave float32's range
    repetition_penalty: Annotated[float, Parameter(Bounds(0.01, 100.0), ROW, THREE, {OLLAMA: "repeat_penalty"})] = 1.0


class Row(NamedTuple):
    """A line of the table."""

    name: str
    type: Any  # int, float, bool or others; with None where that is the default
    default: Any
    parameter: Parameter


@cache
def table() -> Mapping[str, Row]:
    """All parameters by name, those that models recommend last."""
    return {row.name: row for row in _rows()}


def _rows() -> Iterator[Row]:
    hints = get_type_hints(SamplingSettings, include_extras=True)
    for field in msgspec.structs.fields(SamplingSettings):
        kind, *notes = get_args(hints[field.name]) or (None,)
        for parameter in (note for note in notes if isinstance(note, Parameter)):
            yield Row(field.name, kind, field.default, parameter)


def recommended() -> tuple[str, ...]:
    """Names of the parameters that a model's generation_config.json may recommend."""
    return tuple(name for name in SamplingSettings.__struct_fields__ if name not in SamplingFields.__struct_fields__)


@cache
def ranges() -> Mapping[str, Bounds]:
    return {name: row.parameter.range for name, row in table().items() if row.parameter.range is not None}


def names_in(dialect: Dialect) -> dict[str, str]:
    """The dialect's names of the parameters that it has, by ours."""
    rows = (row for row in table().values() if dialect in row.parameter.dialects)
    return {row.name: row.parameter.name_in(dialect, row.name) for row in rows}
