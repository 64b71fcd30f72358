"""`StopMatcher`: finds stop strings in text that arrives in pieces (Aho and Corasick, CACM 1975)."""

from __future__ import annotations

from collections import deque
from functools import lru_cache


class _State:
    """A prefix of some stop string; `depth` characters long."""

    __slots__ = ("depth", "fallback", "match", "next")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.next: dict[str, _State] = {}
        self.fallback: _State = self
        self.match: str | None = None  # the longest stop string that ends here


@lru_cache(maxsize=64)
def _automaton(stops: tuple[str, ...]) -> _State:
    root = _State(0)
    for stop in stops:
        state = root
        for char in stop:
            state = state.next.setdefault(char, _State(state.depth + 1))
        state.match = stop
    queue = deque([root])
    while queue:
        _link_children(queue.popleft(), root, queue)
    return root


def _link_children(parent: _State, root: _State, queue: deque[_State]) -> None:
    for char, child in parent.next.items():
        child.fallback = root if parent is root else _follow(parent.fallback, char)
        child.match = child.match or child.fallback.match
        queue.append(child)


def _follow(state: _State, char: str) -> _State:
    """The longest known prefix that the text read so far, then `char`, ends with."""
    while char not in state.next:
        if state.fallback is state:
            return state
        state = state.fallback
    return state.next[char]


class StopMatcher:
    """One character costs the same however many stop strings there are. The automaton's depth is how much text must be
    held back, because a stop string may have begun."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._root = _automaton(stops)
        self._state = self._root
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that is final, the stop string found or None). Text from a match on is dropped."""
        text = self._held + text
        for end in range(len(self._held), len(text)):
            self._state = _follow(self._state, text[end])
            if self._state.match is not None:
                self._held = ""
                return text[: end + 1 - len(self._state.match)], self._state.match
        final = len(text) - self._state.depth
        self._held = text[final:]
        return text[:final], None

    def flush(self) -> str:
        """No more text comes: what was held back is final."""
        held, self._held = self._held, ""
        return held

    def skip(self, text: str) -> str:
        """Text in which nothing is looked for; matching starts anew after it."""
        self._state = self._root
        return self.flush() + text
