"""The table of sampling parameters is what bodies, checks, the choice of tokens and the documents have."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from repo_scripts import script_module
from tandem.engine.limits import validate
from tandem.engine.protocol import SamplingSettings
from tandem.engine.sampling.logits import DeviceLogits, HostRows, best_of
from tandem.engine.sampling.parameters import Dialect, Place, Row, names_in, ranges, recommended, table
from tandem.engine.sampling.penalties import changes_logits
from tandem.engine.sequence import Sequence
from tandem.errors import RequestError
from tandem.server import fields
from tandem.server.anthropic.schema import MessagesRequest
from tandem.server.chat.openai.schema import ChatRequest
from tandem.server.ollama.schema import Options
from tandem.server.openai_schema import CompletionRequest
from tandem.server.responses.schema import ResponsesRequest
from tandem.server.sampling_bodies import rows_of, sent_parameters
from tandem.server.sglang_schema import SglangSampling

ROUTES_OWN = {"show_tokens", "grammar", "grammar_prefix"}  # no client sends them
BODIES = {
    Dialect.OPENAI: (ChatRequest, CompletionRequest), Dialect.SGLANG: (SglangSampling,), Dialect.OLLAMA: (Options,),
    Dialect.ANTHROPIC: (MessagesRequest,), Dialect.RESPONSES: (ResponsesRequest,),
}  # fmt: skip
# Fields of bodies that have a parameter's name and another meaning.
OTHERS = {(Dialect.OPENAI, "logprobs"): "of a chat a truth value; the routes make `logprobs` of it"}


def test_every_field_is_in_the_table() -> None:
    assert set(table()) == set(SamplingSettings.__struct_fields__) - ROUTES_OWN
    assert set(recommended()) <= set(table())


@pytest.mark.parametrize("dialect", Dialect)
def test_bodies_have_what_the_table_says_and_no_more(dialect: Dialect) -> None:
    known = {row.parameter.name_in(d, name) for name, row in table().items() for d in Dialect} | set(table())
    for body in BODIES[dialect]:
        has = set(body.__struct_fields__) & known
        others = {name for d, name in OTHERS if d == dialect}
        assert has - others == set(names_in(dialect).values()), body.__name__


@pytest.mark.parametrize("dialect", Dialect)
def test_what_a_body_says_arrives_under_our_name(dialect: Dialect) -> None:
    rows = list(rows_of(dialect))
    sent = {row.name: example(row) for row in rows}
    theirs = {row.parameter.name_in(dialect, row.name): sent[row.name] for row in rows}
    for body in BODIES[dialect]:
        required = {f: [] for f in ("messages", "prompt", "input") if f in body.__struct_fields__}
        limit = {"max_tokens": 1} if body is MessagesRequest else {}
        assert sent_parameters(body(**required, **limit, **theirs), dialect) == sent


@pytest.mark.parametrize("name", ranges())
def test_a_value_out_of_range_is_refused_by_name(name: str) -> None:
    lowest, highest, inclusive = ranges()[name]
    default = table()[name].default
    assert default is None or lowest <= default <= highest
    wrong = [lowest - 1 if inclusive else lowest, *([] if highest == math.inf else [highest + 1])]
    for value in wrong:
        with pytest.raises(RequestError) as refused:
            validate(SamplingSettings(**{name: value}), vocab_size=8)
        assert refused.value.param == name
    validate(SamplingSettings(**{name: example(table()[name])}), vocab_size=8)


def example(row: Row):
    """A value that is allowed and is not the default."""
    if isinstance(row.default, bool):
        return not row.default
    lowest, highest, _ = row.parameter.range
    value = lowest + 2 if highest == math.inf else 5 if highest > 100 else (lowest + highest) / 2 + 0.25
    return int(value) if row.type in (int, int | None) else value


ROWS = {name: row for name, row in table().items() if row.parameter.range is not None}
ON_CPU = [name for name, row in ROWS.items() if row.parameter.place is Place.ROW and name != "prompt_logprobs"]
ON_GPU = [name for name, row in ROWS.items() if row.parameter.place is not Place.ROW]


def sequence(name: str) -> Sequence:
    chosen = {name: example(table()[name])} | ({"dry_multiplier": 1.0} if name.startswith("dry_") else {})
    chosen |= {"xtc_probability": 1.0} if name.startswith("xtc_") else {}
    chosen |= {"top_k": 20} if name.startswith(("xtc_", "typical_")) else {}  # alone they look at all tokens
    return Sequence("r", 0, [1, 2], SamplingSettings(**chosen), arrival=0, max_len=64, page_size=16, seed=1)


class NoRows(HostRows):
    def copy_of(self, rows):
        raise AssertionError("a whole row was fetched")


@pytest.mark.parametrize("name", ON_CPU)
def test_those_of_whole_rows_change_logits(name: str) -> None:
    assert changes_logits(sequence(name))


@pytest.mark.parametrize("name", ON_GPU)
def test_others_are_computed_where_the_logits_are(name: str) -> None:
    logits = torch.from_numpy(np.random.default_rng(0).permutation(512).astype(np.float32)[None] / 8)
    device = DeviceLogits(logits, best_of(logits), NoRows(torch.device("cpu")))
    assert device.chosen([0], [sequence(name)], ())[0].token_id >= 0


def test_other_names_lead_to_those_that_a_route_has() -> None:
    groups = [set(names) for names in fields._SAME]
    aliases = [(ours, theirs) for d in Dialect for ours, theirs in names_in(d).items() if ours != theirs]
    ours_only = {"seed", "include_stop", "dry_breakers"}  # no other server has these under a further name
    assert [pair for pair in aliases if pair[0] not in ours_only and not any(set(pair) <= g for g in groups)] == []


def test_the_documents_have_the_table() -> None:
    """After a change: PYTHONPATH=src python scripts/sampling_table.py --write"""
    docs = Path(__file__).parents[2] / "docs"
    assert script_module("sampling_table").lines() in (docs / "http.md").read_text(encoding="utf-8")
    python = (docs / "python.md").read_text(encoding="utf-8")
    assert [name for name in recommended() if f"`{name}`" not in python] == []
