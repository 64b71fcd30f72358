"""Answers match their grammars, whatever the model wants: on an engine around random logits."""

from __future__ import annotations

import codecs
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
import tracemalloc

import jsonschema_rs
import numpy as np
import pytest
import torch

from fake_model import run, text, token_ids
from random_engine import EOS, MARKER, PIECES, VOCAB, ByteTokenizer, answer, beside, engine, request
from tandem.engine.engine import Engine
from tandem.engine.grammar import sources
from tandem.engine.grammar.compiled import CompiledGrammar
from tandem.engine.grammar.compiler import GrammarCompiler
from tandem.engine.grammar.matcher import GrammarMatcher
from tandem.engine.grammar.schema import check_schema
from tandem.engine.grammar.utf8 import never_behind, no_texts
from tandem.engine.protocol import GenerateRequest, Grammar, SamplingSettings, TokenOutput
from tandem.engine.sampling.masks import bits_of, without_forbidden, without_forbidden_rows
from tandem.errors import EngineError, RequestError


@pytest.fixture(scope="module")
def model() -> Engine:
    return engine()


NESTED = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,5}$"},
        "kind": {"enum": ["red", "green", 3, None]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "minItems": 1, "maxItems": 3},
        "child": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": -5, "maximum": 20}, "y": {"type": "boolean"}},
            "required": ["x"],
        },
    },
    "required": ["name", "kind", "tags", "child"],
    "additionalProperties": False,
}
FORMATS = ("u", "uuid"), ("i", "ipv4"), ("d", "date"), ("t", "date-time"), ("o", "time")
SCHEMAS = {
    "nested": NESTED,
    "any object": {"type": "object", "maxProperties": 3, "additionalProperties": {"type": "boolean"}},
    "a required name that properties lack": {
        "type": "object", "required": ["a"], "additionalProperties": {"type": "null"},
    },
    "items as a list": {
        "$schema": "http://json-schema.org/draft-07/schema#", "type": "array",
        "items": [{"type": "boolean"}, {"type": "null"}], "additionalItems": False,
    },
    "a type beside anyOf": {"type": "string", "anyOf": [{"minLength": 3, "maxLength": 4}, {"const": "a"}]},
    "types beside anyOf's own": {
        "type": ["string", "number"],
        "anyOf": [{"type": "integer", "maximum": 3}, {"type": "null"}, {"enum": ["b", None]}],
    },
    "values that are something else": {
        "type": "integer", "enum": [1, 2, "a", 2.5, True, 9], "minimum": 2, "maximum": 8,
    },
    "a text among others": {"type": "string", "enum": ["a", 1, "abcd"], "maxLength": 2.0},
    "a constant": {"type": "number", "const": 3},
    "large lengths that count nothing": {
        "type": "array", "minItems": 5, "maxItems": 5,
        "prefixItems": [
            {"type": "string", "enum": ["a", "b"], "maxLength": 65_535}, {"const": "c", "maxLength": 65_535},
            {"type": "integer", "maxLength": 65_535, "minimum": 0, "maximum": 9},
            {"type": ["null", "boolean"], "minLength": 65_535}, {"enum": [1, "d"], "maxLength": 65_535},
        ],
        "items": False,
    },
    "a whole number as a float": {"type": "string", "minLength": 2.0, "maxLength": 3.0},
    "a tree": {
        "type": "object", "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}, "required": ["next"],
    },
    "definitions": {
        "$defs": {"x": {"type": "integer", "multipleOf": 5}}, "type": "array", "items": {"$ref": "#/$defs/x"},
    },
    "formats": {
        "type": "object", "required": ["u", "i", "d", "t", "o"],
        "properties": {n: {"type": "string", "format": f} for n, f in FORMATS},
    },
    "numbers": {
        "type": "array", "items": {"type": "number", "minimum": 0.5, "maximum": 2}, "minItems": 2, "maxItems": 4,
    },
    "an optional group": {
        "type": "array", "minItems": 5, "items": {"type": "string", "pattern": r"^[0-9]{2}(\.[0-9]+)?$"},
    },
    "several types": {"type": ["integer", "null", "boolean"]},
    "patterns of names": {
        "type": "object", "patternProperties": {"^k[0-9]$": {"type": "null"}}, "additionalProperties": False,
    },
    "patterns of other names": {
        "type": "object", "properties": {"kind": {"type": "null"}}, "required": ["kind"], "minProperties": 2,
        "patternProperties": {
            "^x-[0-9]{1,2}$": {"type": "null"}, "^y[0-9]$": {"enum": [1]}, "^yy?$": {"enum": [1]},
        },
    },
    "lengths": {
        "type": "array", "minItems": 3, "maxItems": 3,
        "items": {"type": ["string", "null"], "minLength": 2, "maxLength": 9},
    },
}  # fmt: skip
REFUSED = {
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "not": ({"properties": {"a": {"not": {"type": "string"}}}}, "#/properties/a: not"),
    "if": ({"if": {}, "then": {}}, "if"),
    "allOf": ({"allOf": [{"type": "string"}, {"minLength": 2}]}, "allOf"),
    "beside $ref": ({"$defs": {"a": {}}, "$ref": "#/$defs/a", "maximum": 3}, "maximum beside $ref"),
    "beside anyOf": ({"properties": {}, "anyOf": [{"required": ["a"]}]}, "properties beside anyOf"),
    "a type beside references": (
        {"$defs": {"a": {"type": "integer"}}, "type": "string", "anyOf": [{"$ref": "#/$defs/a"}]}, "type beside anyOf",
    ),
    "a pattern beside values": ({"enum": ["a"], "pattern": "^b$"}, "pattern beside enum"),
    "no value is left": ({"type": "string", "enum": [1]}, "no value of an enum"),
    "no part is left": ({"type": "string", "anyOf": [{"type": "null"}]}, "no part of anyOf"),
    "half a letter": ({"type": "string", "minLength": 1.5}, "minLength is 1.5"),
    "a required name that a pattern has": (
        {"patternProperties": {"^x": {"type": "integer"}}, "required": ["x1"]}, "beside patternProperties",
    ),
    "patterns that may have the same name": (
        {"patternProperties": {"^ac": {"type": "null"}, "^b": {}, "^ab?": {"type": "integer"}}},
        "#: pattern '^ab?' and pattern '^ac' may have the same name",
    ),
    "a pattern without a beginning": (
        {"patternProperties": {"^(a|b)$": {"type": "null"}, "^c|d": {}, "^e": {"type": "null"}}},
        "pattern '^(a|b)$' and pattern '^c|d'",
    ),
    "a pattern of a listed name": (
        {"properties": {"x-a": {"type": "null"}, "b": {}}, "patternProperties": {"^x\\-": {}}},
        "pattern '^x\\\\-' and property 'x-a'",
    ),
    "names beside others": ({"propertyNames": {"maxLength": 2}, "properties": {"abc": {}}}, "propertyNames beside"),
    "a number of free names": ({"type": "object", "minProperties": 2}, "minProperties of 2"),
    "a number of further names": (
        {"properties": {"a": {}}, "required": ["a"], "minProperties": 3, "additionalProperties": {}}, "minProperties",
    ),
    "nowhere": ({"$ref": "#/$defs/a"}, "nowhere"),
    "elsewhere": ({"$ref": "https://example.com/a.json"}, "must be '#'"),
    "itself": ({"type": "object", "properties": {"c": {"$ref": "#"}}, "required": ["c"]}, "requires itself"),
    "a wrong type": ({"anyOf": 5}, "wrong type"),
    "no type": ({"type": "strnig"}, "strnig"),
    "an empty range": ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum greater than maximum"),
    "a number's steps": ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
    "a look ahead": ({"type": "string", "pattern": "^(?=a)a$"}, "Lookahead"),
    "a back reference": ({"type": "string", "pattern": "^(a)\\1$"}, "Backreference"),
    "texts of large lengths": (
        {"items": {"properties": {f"k{i}": {"type": "string", "maxLength": 3000} for i in range(60)}}},
        "take too long to compile",
    ),
    "a text of a large least length": ({"type": "string", "minLength": 10_001}, "#: maxLength or minLength"),
    "one of several types": ({"type": ["null", "string"], "maxLength": 65_535}, "#: maxLength or minLength"),
    "no type beside a large length": ({"maxLength": 65_535}, "#: maxLength or minLength"),
    "a format that is not known": (
        {"type": "string", "format": "x", "maxLength": 65_535}, "#: maxLength or minLength",
    ),
    "a large length beside a pattern": (
        {"type": "string", "pattern": "^a+$", "maxLength": 65_535}, "pattern combined with minLength/maxLength",
    ),
    "Pydantic's HttpUrl": (
        {"properties": {"url": {"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083}}},
        "refused: #/properties/url: format combined with minLength/maxLength is not supported",
    ),
    "false": (False, "cannot accept any value"),
    "deep": (json.loads('{"items":' * 120 + "{}" + "}" * 120), "deep"),
}  # fmt: skip


def engine_says(model: Engine, grammar: Grammar) -> str:
    """Why it is refused, at once or when it is compiled."""
    try:
        [output] = run(model, request("x", grammar))["x", 0]
    except RequestError as error:
        assert error.param == "grammar"
        return str(error)
    assert output.finish_reason == "error" and output.refused == "grammar"
    return output.error or ""


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_answers_are_valid(model, schema) -> None:
    valid = jsonschema_rs.validator_for(schema, validate_formats=True).is_valid
    outputs = run(model, *[request(str(i), sources.json_schema(schema), seed=i) for i in range(12)])
    assert len(outputs) == 12
    for each in outputs.values():
        assert each[-1].finish_reason == "stop", text(each)
        assert valid(json.loads(text(each))), text(each)


@pytest.mark.parametrize(("schema", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_held_to_is_named(model, schema, said) -> None:
    assert said in engine_says(model, sources.json_schema(schema))


def test_other_grammars(model) -> None:
    cases = {
        r"[0-9]{3}-[a-c]+x": Grammar("regex", r"[0-9]{3}-[a-c]+x"),
        r"(yes|no|\"q\" ü)": sources.choice(["yes", "no", '"q" ü']),
        r"a+b": Grammar("ebnf", 'root ::= "a" root | "ab"'),
        r"<mark>[xy]</mark>": Grammar("structural_tag", json.dumps({
            "type": "structural_tag",
            "format": {"type": "tag", "begin": "<mark>", "content": {"type": "regex", "pattern": "[xy]"},
                       "end": "</mark>"},
        })),
    }  # fmt: skip
    for pattern, grammar in cases.items():
        for seed in range(5):
            out = answer(model, grammar, seed=seed, skip_special_tokens=False, logit_bias={ord("b"): 5.0})
            assert re.fullmatch(pattern, text(out)) and out[-1].finish_reason == "stop", (pattern, text(out))


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", "{"), Grammar("json_schema", "5"), Grammar("regex", "("), Grammar("ebnf", "root ::="),
        Grammar("ebnf", 'other ::= "a"'), Grammar("structural_tag", "[]"), Grammar("regex", " "),
        Grammar("structural_tag", '{"type": "structural_tag", "format": {"type": "tog"}}'), Grammar("regex", "a\0b"),
        Grammar("regex", "a" * (sources.MOST_CHARS + 1)),
    ],
)  # fmt: skip
def test_what_is_no_grammar_is_refused(model, grammar) -> None:
    assert "the grammar of the answer is refused: " in engine_says(model, grammar)


def test_a_grammar_that_takes_too_long_ends_alone(model) -> None:
    huge = {"type": "string", "pattern": "^(a|b|ab){1,3000}(c|d){1,3000}$", "maxLength": 9}
    many = {f"k{i}": {"type": "string", "maxLength": 3000 + i} for i in range(10)}
    began = time.monotonic()
    grammar = sources.json_schema({"type": "object", "properties": many | {"h": huge}})
    [output] = run(model, request("x", grammar))["x", 0]
    said = "takes more than|too much memory|more than 64 MiB|not supported|too busy"
    assert output.finish_reason == "error" and re.search(said, output.error), output.error
    assert time.monotonic() - began < 90  # many times the bound, on a busy machine, too: it is not waited for
    assert json.loads(text(answer(model, sources.json_schema(NESTED))))


def test_end_tokens_and_limits(model) -> None:
    digits = Grammar("regex", "[0-9]+")
    ended = answer(model, digits, logit_bias={EOS: 20.0})
    assert token_ids(ended)[-1] == EOS and ended[-1].stop_match == EOS and len(ended) == 2
    cut = answer(model, digits, ignore_eos=True, max_tokens=30)
    assert cut[-1].finish_reason == "length" and re.fullmatch("[0-9]{30,}", text(cut))
    least = answer(model, digits, min_tokens=9, logit_bias={EOS: 20.0})
    assert len(token_ids(least)) == 10 and token_ids(least)[-1] == EOS
    complete = answer(model, Grammar("regex", "[0-9]{4}"), ignore_eos=True)
    assert complete[-1].finish_reason == "stop" and re.fullmatch("[0-9]{4}", text(complete))
    exact = answer(model, Grammar("regex", "[a-z]{4}"), logit_bias={258 + PIECES.index("ab"): -99.0}, max_tokens=4)
    assert exact[-1].finish_reason == "stop"
    stopped = answer(model, Grammar("regex", "[0-9]{3}x[0-9]{3}"), stop=("x",))
    assert stopped[-1].stop_match == "x" and re.fullmatch("[0-9]{3}", text(stopped))
    marked = answer(model, digits, stop_token_ids=(MARKER,), logit_bias={MARKER: 20.0})
    assert marked[-1].stop_match == MARKER and re.fullmatch("[0-9]+", text(marked))


@pytest.mark.parametrize("schema", [{"minLength": 3, "maxLength": 8}, {}, {"pattern": "^[^a]+$"}])
def test_answers_are_texts(model, schema) -> None:
    """Of a model that likes bytes which stand in none: halves of UTF-16's letters, spellings that are too long."""
    liked = dict.fromkeys((0xC0, 0xE0, 0xED, 0xF0, 0xF4, 0xF5), 9.0) | dict.fromkeys(range(0x80, 0xC0), 6.0)
    grammar = sources.json_schema({"type": "string"} | schema)
    outputs = run(model, *[request(str(i), grammar, seed=i, logit_bias=liked, max_tokens=60) for i in range(12)])
    pieces = ByteTokenizer().token_table().pieces
    for each in outputs.values():
        said = b"".join(pieces[token] for token in token_ids(each))
        assert not said.isascii()
        codecs.getincrementaldecoder("utf-8")().decode(said)  # which may be cut in the midst of a letter


def test_bytes_that_stand_in_no_text() -> None:
    """As Python decodes them: each first byte with each second one."""
    for first, second in itertools.product(range(0xC0, 0x100), range(0x80, 0xC0)):
        spelt = bytes([first, second]) + b"\x80" * ((first >= 0xE0) + (first >= 0xF0))
        try:
            never = not spelt.decode()
        except UnicodeDecodeError:
            never = True
        pieces = [b"a" + spelt, bytes([second]), b"", b"a"]
        alone = first in (0xC0, 0xC1) or first >= 0xF5  # no text has it, whatever comes behind
        assert no_texts(pieces) == ({0} if never else set())
        assert no_texts([bytes([first])]) == ({0} if alone else set())
        assert never_behind(pieces).get(bytes([first]), set()) == ({1} if never and not alone else set())


def test_sampling_and_penalties_stay_within_the_grammar(model) -> None:
    grammar = sources.json_schema(NESTED)
    for change in (
        {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.2}, {"min_p": 0.3}, {"top_k": 1}, {"repetition_penalty": 1.3},
        {"presence_penalty": 2.0, "frequency_penalty": 1.0}, {"logit_bias": {ord("}"): -50.0}}, {"logprobs": 3},
    ):  # fmt: skip
        out = answer(model, grammar, **change)
        assert jsonschema_rs.is_valid(NESTED, json.loads(text(out))), change


def test_log_probabilities_are_those_of_the_model(model) -> None:
    """Of all tokens, those that the grammar forbids included."""
    out = answer(model, Grammar("regex", "[0-9]{3}"), logprobs=2, temperature=0.0)
    for each in out:
        [score] = each.logprobs
        assert score.token_id in each.token_ids and score.logprob < score.top[1][1] < -0.01


def test_several_answers_and_strangers_share_steps(model) -> None:
    alone = token_ids(answer(model, None, max_tokens=20))
    grammar = sources.json_schema(NESTED)
    single = token_ids(answer(model, grammar, seed=3))
    outputs = run(
        model,
        request("free", None, max_tokens=20),
        request("one", grammar, seed=3),
        request("many", grammar, n=5),
        request("other", Grammar("regex", "[0-9]{20}")),
    )
    assert token_ids(outputs["free", 0]) == alone and token_ids(outputs["one", 0]) == single
    answers = {text(outputs["many", i]) for i in range(5)}
    assert len(answers) == 5 and all(jsonschema_rs.is_valid(NESTED, json.loads(each)) for each in answers)
    assert re.fullmatch("[0-9]{20}", text(outputs["other", 0]))


def test_preemption_changes_nothing(model) -> None:
    grammar = Grammar("regex", "[0-9]{60}")
    wanted = {i: text(answer(model, grammar, seed=i)) for i in range(3)}
    small = beside(model, num_pages=24, page_size=4)
    outputs = run(small, *[request(str(i), grammar, seed=i, max_tokens=80) for i in range(3)])
    assert small.stats().preemptions > 0
    assert {i: text(outputs[str(i), 0]) for i in range(3)} == wanted


def test_other_requests_run_while_a_grammar_is_compiled(model, monkeypatch) -> None:
    """By events, not by time: the compiling thread stands still until the other answer has ended."""
    model, may_go_on = beside(model), threading.Event()
    compile_now = GrammarCompiler._compile

    def late(self: GrammarCompiler, *asked) -> CompiledGrammar:
        assert may_go_on.wait(60)
        return compile_now(self, *asked)

    monkeypatch.setattr(GrammarCompiler, "_compile", late)
    model.add(request("slow", Grammar("regex", "[0-9]{3}")))
    others = run_until(model, request("free", None, max_tokens=50, ignore_eos=True), "free")
    assert len(token_ids(others)) == 50 and model.stats().waiting == 1
    may_go_on.set()
    assert re.fullmatch("[0-9]{3}", text(run_until(model, None, "slow")))


def run_until(model: Engine, one: GenerateRequest | None, name: str) -> list[TokenOutput]:
    """Steps until that answer has ended."""
    if one is not None:
        model.add(one)
    outputs: list[TokenOutput] = []
    while not outputs or outputs[-1].finish_reason is None:
        outputs += [each for each in model.step() if each.id == name]
    return outputs


def test_an_aborted_request_does_not_wait_for_its_grammar(model) -> None:
    model.add(request("gone", Grammar("regex", "[a-f]{7}"), n=2))
    model.abort("gone")
    outputs = []
    while model.has_work():
        outputs += model.step()
    assert [o.finish_reason for o in outputs] == ["abort", "abort"]
    assert text(answer(model, Grammar("regex", "[a-f]{3}x")))


def test_a_dead_compiling_process_is_replaced(model) -> None:
    assert answer(model, Grammar("regex", "[a-f]{5}"))
    process = model.grammars._compiler._ready[2]
    process._process.kill()
    process._process.wait()
    assert re.fullmatch("[a-f]{6}", text(answer(model, Grammar("regex", "[a-f]{6}"))))


def test_equal_grammars_are_compiled_once_and_old_ones_forgotten(model, monkeypatch) -> None:
    model, compiled = beside(model), []
    monkeypatch.setattr("tandem.engine.grammar.compiler.MOST_CACHED", 2)
    plain = GrammarCompiler._compile
    monkeypatch.setattr(
        GrammarCompiler, "_compile", lambda self, g, *more: (compiled.append(g.text), plain(self, g, *more))[1]
    )
    for pattern in ("a", "b", "a", "c", "a", "b"):
        assert text(answer(model, Grammar("regex", pattern))) == pattern
    assert compiled == ["a", "b", "c", "b"]


def test_a_mask_is_made_when_it_is_asked_for_unless_the_answer_may_have_ended(model) -> None:
    """So it can be made while the next logits are computed. Where it is, is known before."""
    matcher = GrammarMatcher(compiled_for(model, Grammar("regex", "ab([0-9]c?)?")), SamplingSettings())
    place, first = matcher.place, allowed(matcher.place)
    for token, wanted in zip(b"a7", [None, set(b"c") | {EOS}], strict=True):
        matcher.accept(token)
        assert matcher.place is place
        assert allowed(place) == (first if wanted is None else wanted)
        if token == ord("a"):
            matcher.look_ahead()
            assert allowed(place) == {ord("b")}
            matcher.accept(ord("b"))  # "ab" is an answer: its mask is there at once
            assert allowed(place) == {*b"0123456789", EOS}


def test_masks_follow_the_answer(model) -> None:
    """Also those of rows of draft tokens: each is taken before the next mask is asked for."""
    matcher = GrammarMatcher(compiled_for(model, Grammar("regex", "ab[0-9]")), SamplingSettings())
    wanted = [{ord("a"), 258 + PIECES.index("ab")}, {ord("b")}, {*b"0123456789"}]
    for token, expected in zip(b"ab7", wanted, strict=True):
        assert not matcher.ended and allowed(matcher.mask) == expected
        matcher.accept(token)
    assert matcher.ended
    with pytest.raises(EngineError, match="does not match"):
        matcher.accept(ord("a"))


def compiled_for(model: Engine, grammar: Grammar) -> CompiledGrammar:
    compiler = model.grammars._compiler
    one = compiler.ask(grammar)
    one.future.result(240)
    return compiler.take(one)


def allowed(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.isfinite(without_forbidden(np.zeros(VOCAB, np.float32), mask))).tolist())


def test_masks_on_rows() -> None:
    logits = torch.randn(3, 71)
    logits[2, 5] = torch.nan
    ids = [{0, 31, 32, 70}, set(range(71)), {1}]
    masks = torch.from_numpy(np.stack([bits_of(each, 71) for each in ids]))
    got = without_forbidden_rows(logits, masks)
    for row, mask, each, kept in zip(logits, masks, ids, got, strict=True):
        wanted = torch.full((71,), float("-inf"))
        wanted[sorted(each)] = row[sorted(each)]
        assert torch.equal(torch.from_numpy(without_forbidden(row.numpy(), mask.numpy())), wanted)
        assert torch.equal(kept[~kept.isnan()], wanted[~kept.isnan()])
    assert got[2].isnan().sum() == 1  # a broken row stays known as one


def test_nothing_is_imported_before_a_grammar_is_used() -> None:
    code = (
        "import sys, fake_model as f, tandem.engine.engine\n"
        "f.run(f.fake_engine(), f.request('a', [2, 3]))\n"
        "assert not {'xgrammar', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ, PYTHONPATH=":".join(sys.path)))


def test_a_refusal_is_worded_once() -> None:
    with pytest.raises(RequestError, match=r"^#: uniqueItems cannot be held to; leave it out$"):
        check_schema({"type": "array", "uniqueItems": True})


def test_large_schemas_are_refused_before_they_take_memory() -> None:
    """A long key is in the place of every child."""
    inner = {"type": "object", "properties": {f"p{i}": {} for i in range(20_000)}}
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="more than 10000 parts"):
            check_schema({"type": "object", "properties": {"k" * 100_000: inner}})
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_other_spellings_of_a_reference_are_one() -> None:
    a = {"type": "object", "properties": {f"p{i}": {} for i in range(50)}, "required": ["p0"] * 20_000}
    spellings = ["#/$defs/a", "#/$defs/%61", "#/%24defs/a", "#/%24defs/%61"]
    check_schema({"$defs": {"a": a}, "anyOf": [{"$ref": each} for each in spellings]})
    with pytest.raises(RequestError, match="requires itself"):
        loop = {"type": "object", "properties": {"x": {"$ref": "#/$defs/%61"}}, "required": ["x"]}
        check_schema({"$defs": {"a": loop}, "$ref": "#/$defs/a"})
