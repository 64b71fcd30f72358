"""Which replica answers: equal prefixes the same one, unless it is far ahead of the others."""

from __future__ import annotations

import json
from collections import Counter

from tandem.ray.choice import MOST_AHEAD, PREFIX_BYTES, key_of, prompt_of, ranked

NAMES = ("a", "b", "c", "d")
IDLE = dict.fromkeys(NAMES, 0)
KEYS = [f"prompt {number}".encode() for number in range(400)]


def key(**fields: object) -> bytes:
    return key_of(prompt_of(json.dumps(fields).encode()))


def test_keys_are_spread_and_stay_when_a_replica_goes():
    """Each key's order is of its own: those of the one that goes are divided among the others."""
    first = {key: ranked(key, IDLE)[0] for key in KEYS}
    counts = Counter(first.values())
    assert set(counts) == set(NAMES) and max(counts.values()) < 2 * min(counts.values())
    fewer = {name: 0 for name in NAMES if name != "b"}
    moved = {key: ranked(key, fewer)[0] for key in KEYS}
    assert all(moved[key] == first[key] for key in KEYS if first[key] != "b")
    assert {moved[key] for key in KEYS if first[key] == "b"} == set(fewer)


def test_one_that_is_far_ahead_is_spared():
    best, second, *_ = ranked(b"k", IDLE)
    assert ranked(b"k", IDLE | {best: MOST_AHEAD})[0] == best
    order = ranked(b"k", IDLE | {best: MOST_AHEAD + 1})
    assert order[0] == second and order[-1] == best
    assert ranked(b"k", dict.fromkeys(NAMES, 9))[0] == best  # all are busy


def test_one_that_could_not_answer_comes_last():
    best, second, *_ = ranked(b"k", IDLE)
    assert ranked(b"k", IDLE, avoid=(best,))[0] == second
    assert sorted(ranked(b"k", IDLE, avoid=NAMES)) == sorted(NAMES)
    assert ranked(b"k", {}) == []


def test_a_key_is_what_a_prompt_begins_with():
    system = {"role": "system", "content": "x" * PREFIX_BYTES}
    one, other = ([system, {"role": "user", "content": text}] for text in ("a", "b"))
    assert key(model="m", messages=one) == key(model="m", messages=other, temperature=1)
    short = {"role": "system", "content": "y"}
    assert key(messages=[short, one[1]]) != key(messages=[short, other[1]])
    asked = [{"role": "user", "content": "a"}]
    assert key(system="s", messages=asked) != key(system="t", messages=asked)  # Anthropic's
    for field in ("prompt", "input", "text", "input_ids"):
        assert key(**{field: "a"}) == key(**{field: "a"}, stream=True) != key(**{field: "b"})


def test_a_client_may_say_the_key():
    assert key(messages=[1], prompt_cache_key="s") == key(messages=[2], prompt_cache_key="s") == b"s"
    assert key() == b""
