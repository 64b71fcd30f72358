"""What a grammar may cost others: time of the engine's thread, compiling processes, memory."""

from __future__ import annotations

import json
import os
import random
import re
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest

from fake_model import run, text, token_ids
from random_engine import EOS, MARKER, VOCAB, beside, engine, request
from tandem.engine.grammar import allowance, compiler, jobs, process, sources
from tandem.engine.grammar.allowance import Allowance, GrammarTooSlow
from tandem.engine.grammar.answers import receive_answer, send_answer
from tandem.engine.grammar.compiled import CompiledGrammar
from tandem.engine.grammar.compiler import GrammarCompiler
from tandem.engine.grammar.matcher import GrammarMatcher
from tandem.engine.grammar.process import Cancellation, CompilerProcess, allowed_cpus
from tandem.engine.grammar.vocabulary import Vocabulary
from tandem.engine.grammar.worker import MOST_THREADS, threads_on
from tandem.engine.llm import LLM
from tandem.engine.protocol import Grammar, SamplingSettings
from tandem.engine.sampling.masks import allows, bits_but, bits_of
from tandem.errors import BusyError, EngineError, RequestError
from tandem.text.token_table import TokenTable

TOKENS = 20_000
DIGITS = Grammar("regex", "[0-9]{3}")
# Forty digits more than the probe looks at; then ways without end.
LATE = Grammar("ebnf", "root ::= [0-9]{90} s\ns ::= s s | [a-z]")


@cache
def vocabulary() -> Vocabulary:
    """As large as a small tokenizer's: each token of letters must be tried where letters may come."""
    chance = random.Random(0)
    pieces = {bytes([i]): None for i in range(256)} | {b"<eos>": None}
    while len(pieces) < TOKENS:
        pieces[bytes(chance.choices(b"etaoinshrdlu ,.01\"", k=chance.randint(2, 9)))] = None
    return Vocabulary.of(TokenTable(tuple(pieces), {EOS: "<eos>"}), TOKENS, (EOS,))


@pytest.fixture(scope="module")
def large():
    made = GrammarCompiler(vocabulary)
    made.patient = True
    yield made
    made.close()


@pytest.fixture(scope="module")
def model():
    made = engine()
    yield made
    made.close()


# --- time of the engine's thread


AMBIGUOUS = {
    "a rule twice": Grammar("ebnf", "root ::= s\ns ::= s s | [a-z]"),
    "a star of a star": Grammar("regex", "(([a-z]*)*)*b"),
    "stars in a star": Grammar("regex", "([a-z]*[a-z]*[a-z]*)*b"),
    "in a tag": Grammar("structural_tag", json.dumps({
        "type": "structural_tag",
        "format": {"type": "tag", "begin": "<", "content": {"type": "regex", "pattern": "(([a-z]*)*)*b"}, "end": ">"},
    })),
}  # fmt: skip


@pytest.mark.parametrize("grammar", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_ambiguous_grammars_are_refused(large, grammar) -> None:
    with pytest.raises(RequestError, match="ambiguous"):
        large.ask(grammar).future.result(240)


def test_what_grows_with_the_text_is_refused_where_tokens_are_short(model) -> None:
    [output] = run(model, request("x", Grammar("regex", "((a*)*)*b")))["x", 0]
    assert output.refused == "grammar" and "ambiguous" in output.error


PLAIN = {
    "words": Grammar("regex", r"[a-z]+( [a-z]+)*\."), "any text": Grammar("regex", r".{1,50}"),
    "lines": Grammar("ebnf", 'root ::= (line "\\n")*\nline ::= [^\\n]*'),
    "nested": Grammar("ebnf", 'root ::= "(" root* ")" | [a-z]'),
    "palindromes": Grammar("ebnf", 'root ::= "a" root "a" | "b" root "b" | "c"'),
    "a pattern": sources.json_schema({"type": "array", "items": {"type": "string", "pattern": "^(([a-z]+)*)+$"}}),
    "objects": sources.json_object(),
    "a list": sources.json_schema({"type": "array", "items": {"type": "string"}}),
}  # fmt: skip


@pytest.mark.parametrize("grammar", PLAIN.values(), ids=PLAIN)
def test_others_are_not(large, grammar) -> None:
    assert large.ask(grammar).future.result(240).nbytes > 0


def test_one_that_turns_out_ambiguous_ends_its_answer(large) -> None:
    """And is refused from then on. What it takes until then is near the bound, not many times that."""
    one = large.ask(LATE)
    one.future.result(240)
    matcher, began = GrammarMatcher(large.take(one), SamplingSettings()), time.thread_time()
    for _ in range(90):
        matcher.accept(ord("7"))
    with pytest.raises(GrammarTooSlow, match="ambiguous"):
        for _ in range(1000):
            matcher.accept(ord("e"))
    assert time.thread_time() - began < 40 * allowance.MOST_SECONDS
    with pytest.raises(RequestError, match="ambiguous"):
        large.ask(LATE)


@pytest.mark.parametrize("pattern", ["[0-9]+", "[0-9]{3000}"], ids=["complete at each token", "not complete"])
def test_only_the_answer_of_a_slow_grammar_ends(model, monkeypatch, pattern: str) -> None:
    """Also where its mask is made after others' tokens have been chosen."""
    free = token_ids(run(model, request("free", None, max_tokens=60))["free", 0])
    monkeypatch.setattr(allowance, "SECONDS_PER_TOKEN", 1e-9)  # as if every grammar were slow
    monkeypatch.setattr(allowance, "MOST_SECONDS", 0.002)
    slow = request("slow", Grammar("regex", pattern), ignore_eos=True, max_tokens=3000)
    outputs = run(model, slow, request("free", None, max_tokens=60))
    last = outputs["slow", 0][-1]
    assert last.finish_reason == "error" and "ambiguous" in last.error and last.refused is None
    assert re.fullmatch("[0-9]+", text(outputs["slow", 0]))
    assert token_ids(outputs["free", 0]) == free


def test_only_the_answer_of_a_matcher_that_fails_ends(model, monkeypatch) -> None:
    """Whatever the library says when it is asked for a mask."""
    fill, asked = GrammarMatcher._fill, list[GrammarMatcher]()

    def broken(matcher: GrammarMatcher) -> None:
        asked.append(matcher)
        if matcher is asked[0] and asked.count(matcher) == 3:
            raise RuntimeError("an assertion of the library")
        fill(matcher)

    monkeypatch.setattr(GrammarMatcher, "_fill", broken)
    outputs = run(model, request("bad", DIGITS), request("good", DIGITS))
    last = outputs["bad", 0][-1]
    assert last.finish_reason == "error" and "an assertion of the library" in last.error
    assert re.fullmatch("[0-9]{3}", text(outputs["good", 0]))


def test_an_allowance_pays_back() -> None:
    many, once = Allowance(), Allowance()
    for _ in range(1000):
        many.spend(0.9 * allowance.SECONDS_PER_TOKEN, 1)
    with pytest.raises(GrammarTooSlow):
        for _ in range(1000):
            many.spend(1.1 * allowance.SECONDS_PER_TOKEN, 1)
    once.spend(0.9 * allowance.MOST_SECONDS, 1)
    with pytest.raises(GrammarTooSlow):
        once.spend(0.3 * allowance.MOST_SECONDS, 1)


# --- compiling processes


SLOW = Grammar("regex", ".{1,600}")  # seconds, for so many tokens


def forks(made: GrammarCompiler) -> list[int]:
    """Processes of jobs."""
    parent = made._ready[2]._process.pid
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def until(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_nobodys_grammar_is_not_compiled(large) -> None:
    large.ask(DIGITS).future.result(240)
    until(lambda: not forks(large))
    one = large.ask(SLOW)
    until(lambda: forks(large))
    assert large.ask(SLOW) is one
    large.leave(one)
    assert not one.future.done() and forks(large)  # another waits
    large.leave(one)
    with pytest.raises(EngineError):
        one.future.result(240)
    until(lambda: not forks(large))
    assert large.ask(DIGITS).future.result(240)


def test_an_aborted_request_leaves_no_job(model, monkeypatch) -> None:
    left = []
    monkeypatch.setattr(GrammarCompiler, "leave", lambda self, one: left.append(one.grammar))
    monkeypatch.setattr(GrammarCompiler, "_compile", lambda self, grammar, job: time.sleep(0.2))
    model.add(request("gone", SLOW, n=2))
    model.abort("gone")
    assert [o.finish_reason for o in model.step()] == ["abort", "abort"] and left == [SLOW]
    assert not model.has_work()


def test_too_many_wait(model, monkeypatch) -> None:
    may_go_on, compile_now = threading.Event(), GrammarCompiler._compile
    made = beside(model).grammars._compiler
    monkeypatch.setattr(compiler, "MOST_SMALL_WAITING", 3)
    monkeypatch.setattr(
        GrammarCompiler, "_compile", lambda self, *asked: (may_go_on.wait(60), compile_now(self, *asked))[1]
    )
    waiting = [made.ask(Grammar("regex", pattern)) for pattern in ("a", "b", "c", "a")]
    with pytest.raises(BusyError, match="3 grammars are waiting"):
        made.ask(Grammar("regex", "d"))
    may_go_on.set()
    for one in waiting:
        assert one.future.result(240)
    assert made.ask(Grammar("regex", "d")).future.result(240)


def test_small_grammars_wait_for_each_other(model) -> None:
    """Each client has a schema of its own: more than ever were let wait, beside as many hostile ones as are."""
    made = beside(model).grammars._compiler
    slow = [Grammar("regex", f"(a|b){{{1000 + i}}}") for i in range(compiler.MOST_WAITING)]
    held = threading.Event()
    compile_now = made._compile

    def compile_held(grammar: Grammar, cancellation: Any) -> Any:
        return held.wait(240) if grammar in slow else compile_now(grammar, cancellation)

    made._compile = compile_held
    hostile = [made.ask(grammar) for grammar in slow]
    try:
        with pytest.raises(BusyError, match="64 grammars are waiting"):
            made.ask(Grammar("regex", "(a|b){999}"))
        schemas = [{"type": "object", "properties": {f"name{i}": {"type": "string"}}} for i in range(100)]
        small = [made.ask(sources.json_schema(schema)) for schema in schemas]
        for one in small:  # while the others are not
            assert one.future.result(240)
        assert not any(one.future.done() for one in hostile)
    finally:
        held.set()  # or the process would not end for an hour


@pytest.mark.parametrize("text,small", [
    ('{"type": "string"}', True), ('{"maximum": 100000}', True), ('{"maxLength": 99}', True),
    ('{"$schema": "https://json-schema.org/draft/2020-12/schema"}', True),
    ('{"maxLength": 100}', False), ('{"minItems":2083}', False), ("a{1,500}", False), ("a{500}", False),
    ("a{,500}", False), ("a{5}{5}", True), ("x" * 4097, False),
])  # fmt: skip
def test_which_grammars_are_small(text: str, small: bool) -> None:
    assert sources.is_small(Grammar("regex", text)) == small


def test_a_list_of_prompts_may_have_more_grammars(model, monkeypatch) -> None:
    """In one's own process the others wait: nobody else is kept from anything."""
    monkeypatch.setattr(compiler, "MOST_SMALL_WAITING", 1)
    patterns = [f"{letter}[0-9]{{2}}" for letter in "pqrstu"]
    params = [SamplingSettings(grammar=Grammar("regex", each)) for each in patterns]
    made = LLM.from_engine(model).generate([[63]] * len(patterns), params, progress=False)
    for each, pattern in zip(made, patterns, strict=True):
        assert re.fullmatch(pattern, each.text) and each.finish_reason == "stop"


@contextmanager
def jobs_running(work) -> Iterator[socket.socket]:
    """The engine's end; jobs are run by another process."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            jobs.Jobs(theirs, work, threads=1).run()
        finally:
            os._exit(0)
    with ours, theirs:
        theirs.close()
        yield ours
    os.waitpid(pid, 0)


def answer_of(to: socket.socket, mark: bytes = jobs.USUAL) -> bytes:
    ours, theirs = socket.socketpair()
    with ours:
        ours.settimeout(60)
        with theirs:
            socket.send_fds(to, [mark], [theirs.fileno()])
        return receive_answer(ours)


def end_with(code: int, answer: socket.socket, said: bytes = b"") -> NoReturn:
    if said:
        send_answer(answer, said)
    os._exit(code)


def spin() -> NoReturn:
    while True:
        pass


def test_time_on_a_cpu_decides_not_the_clock(monkeypatch) -> None:
    monkeypatch.setattr(jobs, "COMPILE_SECONDS", 0.3)
    busy = lambda answer: (time.sleep(1.0), end_with(0, answer, b"+done"))  # noqa: E731
    for work, clock, said in (
        (busy, 60.0, "+done"), (lambda answer: spin(), 60.0, "-compiling it takes more than"),
        (lambda answer: time.sleep(100), 1.0, "?the machine is too busy"),
        (lambda answer: end_with(1, answer), 60.0, "-compiling it takes too much memory"),
    ):  # fmt: skip
        monkeypatch.setattr(jobs, "WALL_SECONDS", clock)
        monkeypatch.setattr(jobs, "BUSY_SECONDS", clock)
        with jobs_running(work) as to:
            assert answer_of(to).decode().startswith(said)


def test_a_refusal_does_not_wait_until_the_jobs_memory_is_free(monkeypatch) -> None:
    """Which takes a busy machine tenths of a second, of the two that a refusal may take."""
    monkeypatch.setattr(jobs, "COMPILE_SECONDS", 0.1)
    ended = os.waitpid
    monkeypatch.setattr(os, "waitpid", lambda pid, how: ended(pid, how) if how else os._exit(1))
    with jobs_running(lambda answer: spin()) as to:
        assert answer_of(to).startswith(b"-compiling it takes more than")
        monkeypatch.undo()


def test_a_busy_machine_is_no_reason_to_wait_for_a_large_grammar(monkeypatch) -> None:
    """Its own time would allow it: it may be asked for again. A small one is waited for."""
    monkeypatch.setattr(jobs, "COMPILE_SECONDS", 60.0)
    monkeypatch.setattr(jobs, "LARGE_SECONDS", 0.1)
    monkeypatch.setattr(jobs, "BUSY_SECONDS", 0.5)
    with jobs_running(lambda answer: spin()) as to:
        assert answer_of(to) == (
            b"?the machine is too busy to compile it in 0.5 s; make it smaller, or try again: it may then take 30 s"
        )
    with jobs_running(lambda answer: (time.sleep(1.5), end_with(0, answer, b"+done"))) as to:
        assert answer_of(to) == b"+done"


def counted(letter: str) -> Grammar:
    return Grammar("regex", f"{letter}{{1000}}")


def test_one_that_the_clock_has_ended_gets_its_own_time_next(monkeypatch) -> None:
    """Else a good schema is never accepted where the machine is always busy. Others are not waited for so long."""
    monkeypatch.setattr(jobs, "COMPILE_SECONDS", 60.0)
    monkeypatch.setattr(jobs, "LARGE_SECONDS", 0.1)
    monkeypatch.setattr(jobs, "BUSY_SECONDS", 0.2)
    monkeypatch.setattr(process, "MOST_HURRIED", 2)
    may_end, tell = os.pipe()

    def work(answer: socket.socket) -> NoReturn:
        while time.process_time() < 0.15:
            pass
        os.read(may_end, 1)
        end_with(0, answer, b"+done")

    def allowed(grammar: Grammar) -> bytes:
        """One job may end after all, later than the clock would have ended it."""
        timer = threading.Timer(0.5, os.write, (tell, b"."))
        timer.start()
        return made.compiled(grammar, Cancellation())

    made = CompilerProcess(vocabulary(), set())
    with jobs_running(work) as to:
        made._socket = to
        for letter in "abc":  # and so "a" is forgotten
            with pytest.raises(EngineError, match="in 0.2 s; .* try again: it may then take 30 s"):
                made.compiled(counted(letter), Cancellation())
        assert allowed(counted("b")) == allowed(counted("c")) == b"done"
        with pytest.raises(EngineError, match="in 0.2 s"):
            made.compiled(counted("a"), Cancellation())
        assert allowed(Grammar("regex", "a")) == b"done"  # a small one gets its time at once
    os.close(may_end)
    os.close(tell)


def test_an_answer_is_whole_though_its_job_is_ended_before_anybody_reads_it(monkeypatch) -> None:
    """Of a stream the reader would have what a socket holds, and would take the next words for the rest."""
    large, (answered, tell) = b"+" + bytes(4 << 20), os.pipe()
    monkeypatch.setattr(jobs, "_seconds", lambda *of: 99.0 if select.select([answered], [], [], 0)[0] else 0.0)

    def work(answer: socket.socket) -> NoReturn:
        send_answer(answer, large)
        os.write(tell, b".")
        spin()

    with jobs_running(work) as to:
        ours, theirs = socket.socketpair()
        with ours:
            socket.send_fds(to, [jobs.USUAL], [theirs.fileno()])
            theirs.close()
            ours.settimeout(60)
            assert select.select([answered], [], [], 60)[0], "it waits for its reader"
            assert receive_answer(ours) == large
            assert receive_answer(ours).startswith(b"-compiling it takes more than")  # said later
            with pytest.raises(EOFError):
                receive_answer(ours)
    os.close(answered)
    os.close(tell)


def test_patience_has_an_end_and_so_has_own_time(monkeypatch) -> None:
    monkeypatch.setattr(jobs, "LARGE_SECONDS", 0.1)
    monkeypatch.setattr(jobs, "BUSY_SECONDS", 0.2)
    for own, clock, said in (
        (60.0, 0.8, "?the machine is too busy to compile it in 0.8 s; make it smaller, or try again"),
        (0.3, 30.0, "-compiling it takes more than 1.45 s"),
    ):
        monkeypatch.setattr(jobs, "COMPILE_SECONDS", own)
        monkeypatch.setattr(jobs, "WALL_SECONDS", clock)
        with jobs_running(lambda answer: spin()) as to:
            assert answer_of(to, jobs.PATIENT).decode().partition("; make it smaller: ")[0] == said


@pytest.mark.parametrize(
    ("cpus", "quota", "threads"),
    [(64, None, MOST_THREADS), (6, None, 3), (1, None, 1), (64, 4.0, 2), (64, 1.5, 1), (64, 0.5, 1), (4, 64.0, 2)],
)
def test_half_of_what_may_be_used_compiles(cpus, quota, threads) -> None:
    assert threads_on(cpus, quota) == threads


def test_a_job_ends_with_its_clients_socket_and_all_with_the_engines() -> None:
    started, ends = socket.socketpair()

    def work(answer: socket.socket) -> NoReturn:
        started.send(os.getpid().to_bytes(4, "little"))
        time.sleep(1000)
        os._exit(0)

    def begun(to: socket.socket) -> tuple[socket.socket, int]:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(to, [jobs.USUAL], [theirs.fileno()])
        return ours, int.from_bytes(ends.recv(4), "little")

    with jobs_running(work) as to:
        (first, first_id), (second, second_id) = begun(to), begun(to)
        first.close()
        until(lambda: not Path(f"/proc/{first_id}").exists())
        assert Path(f"/proc/{second_id}").exists()
    assert not Path(f"/proc/{second_id}").exists()
    second.close()


def test_closing_leaves_no_process(model) -> None:
    made = GrammarCompiler(vocabulary)
    made.ask(DIGITS).future.result(240)
    until(lambda: not forks(made))
    waiting, parent = made.ask(SLOW), made._ready[2]._process.pid
    until(lambda: forks(made))
    [job] = forks(made)
    made.close()
    assert isinstance(waiting.future.exception(240), EngineError)
    assert not Path(f"/proc/{parent}").exists()
    until(lambda: not Path(f"/proc/{job}").exists())


def test_a_job_that_was_not_sent_is_not_taken_for_the_next(model, monkeypatch) -> None:
    words = Vocabulary.of(TokenTable((b"a", b"b", b""), {2: "<eos>"}), 3, (2,))
    made, plain = CompilerProcess(words, allowed_cpus()), socket.send_fds
    try:
        assert made.compiled(Grammar("regex", "a"), Cancellation())
        ours, theirs = socket.socketpair()
        made._hand_over(theirs, jobs.USUAL)
        theirs.close()
        ours.close()  # before the grammar was written
        assert b"ebnf" not in made.compiled(Grammar("regex", "ab"), Cancellation())[:1]
        monkeypatch.setattr(socket, "send_fds", lambda *_: (_ for _ in ()).throw(TimeoutError("full")))
        with pytest.raises(EngineError, match="try again"):
            made.compiled(Grammar("regex", "aa"), Cancellation())
        monkeypatch.setattr(socket, "send_fds", plain)
        assert made.compiled(Grammar("regex", "bb"), Cancellation())
    finally:
        made.close()


# --- memory


def test_compiled_grammars_take_bounded_memory(model) -> None:
    """What is in use stays, what is idle goes, what does not fit beside those in use is refused for now."""
    made = beside(model).grammars._compiler
    size = compiled_by(made, "a").nbytes
    made._most_bytes = 2 * size + size // 2
    users = [GrammarMatcher(compiled_by(made, pattern), SamplingSettings()) for pattern in "bc"]
    assert {one.text for one in made._known} == {"b", "c"}
    with pytest.raises(EngineError, match="running requests take all of the"):
        compiled_by(made, "d")
    assert {one.text for one in made._known} == {"b", "c"}
    assert compiled_by(made, "b") is users[0]._compiled
    del users[0]
    assert compiled_by(made, "d") and {one.text for one in made._known} == {"c", "d"}
    made._most_bytes = size // 2
    with pytest.raises(RequestError, match="more than"):
        compiled_by(made, "e")


def compiled_by(made: GrammarCompiler, pattern: str) -> CompiledGrammar:
    one = made.ask(Grammar("regex", pattern))
    one.future.result(240)
    return made.take(one)


def test_refused_grammars_are_forgotten(model) -> None:
    """Their texts, too, take memory."""
    made = beside(model).grammars._compiler
    one = made.ask(Grammar("ebnf", "root ::= nobody"))
    assert one.future.exception(240)
    with pytest.raises(RequestError):
        made.take(one)
    assert not made._known


def test_an_answer_that_has_ended_uses_no_grammar(model) -> None:
    for change in ({}, {"max_tokens": 1}, {"stop": ("1",), "logit_bias": {ord("1"): 99.0}}):
        run(model, request("x", DIGITS, n=3, **change))
    model.add(request("gone", DIGITS, n=2))
    model.grammars.waiting[0][1].future.result(240)
    model.step()
    known = model.grammars._compiler._known[DIGITS]
    assert len(known.compiled.users) == 2 and not known.idle
    model.abort("gone")
    assert known.idle


def test_all_grammars_share_one_table_of_tokens(monkeypatch) -> None:
    import xgrammar

    made, plain = [], xgrammar.TokenizerInfo
    monkeypatch.setattr(xgrammar, "TokenizerInfo", lambda *said, **more: (made.append(1), plain(*said, **more))[1])
    fresh = engine()
    for pattern in ("[0-9]", "<mark>[0-9]", "[0-9]<eos>", "<mark>[0-9]<eos>"):
        said = text(run(fresh, request("x", Grammar("regex", pattern), skip_special_tokens=False))["x", 0])
        assert re.fullmatch(pattern.removesuffix("<eos>"), said.removesuffix("<eos>"))
    assert made == [1]
    fresh.close()


# --- masks


def test_no_token_goes_on() -> None:
    """A model without the letter that the grammar wants: an error, not whatever else is probable."""
    digits = tuple(str(i).encode() for i in range(10))
    made = GrammarCompiler(lambda: Vocabulary.of(TokenTable((*digits, b""), {10: "<eos>"}), 40, (10,)))
    matcher = GrammarMatcher(compiled_by(made, "[0-9]?[0-9]x"), SamplingSettings())
    matcher.accept(3)
    matcher.accept(4)
    matcher.look_ahead()
    assert not matcher.place.any() and not matcher.ended
    for _ in range(2):
        with pytest.raises(EngineError, match="no token of this model continues"):
            matcher.check()
    with pytest.raises(EngineError, match="no token of this model continues"):
        matcher.accept(4)
    with pytest.raises(EngineError, match="no token of this model continues"):
        GrammarMatcher(compiled_by(made, "x"), SamplingSettings())
    made.close()


def test_what_is_left_may_be_forbidden_as_well(model) -> None:
    outputs = run(
        model, request("x", Grammar("regex", "[0-9]x"), stop_token_ids=(ord("x"),), min_tokens=5),
        request("y", Grammar("regex", "[0-9]x"), stop_token_ids=(ord("x"),)),
    )  # fmt: skip
    last = outputs["x", 0][-1]
    assert last.finish_reason == "error" and "min_tokens" in last.error
    assert outputs["y", 0][-1].stop_match == ord("x")


def test_end_tokens_come_where_the_grammar_may_end_alone(model) -> None:
    pushed = {EOS: 99.0, MARKER: 99.0, VOCAB - 1: 99.0}
    for change, wanted in (
        ({}, "[c-z]{2}"), ({"ignore_eos": True}, "[c-z]{4}"), ({"min_tokens": 3}, "[c-z]{3}"),
        ({"min_tokens": 9}, "[c-z]{4}"), ({"stop_token_ids": (MARKER,)}, "[c-z]{2}"),
        ({"repetition_penalty": 1.5, "presence_penalty": 1.0, "temperature": 0.0}, "[c-z]{2}"),
    ):  # fmt: skip
        out = run(model, request("x", Grammar("regex", "[c-z]{2,4}"), logit_bias=pushed, **change))["x", 0]
        assert out[-1].finish_reason == "stop" and re.fullmatch(wanted, text(out)), (change, text(out))


def test_bits() -> None:
    for vocab in (1, 31, 32, 33, 300):
        hidden = {0, vocab - 1}
        mask = bits_but(hidden, vocab)
        assert [i for i in range(32 * len(mask)) if allows(mask, i)] == [i for i in range(vocab) if i not in hidden]
        assert not (mask & bits_of(hidden, vocab)).any()
