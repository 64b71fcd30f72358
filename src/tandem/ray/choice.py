"""`ranked`: which replica answers a prompt. Prompts that begin alike go to one replica, whose prefix cache has them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

import msgspec

from tandem.server.body import decode
from tandem.server.front.dialects import FrontFields

PREFIX_BYTES = 1024  # of a prompt: two that are equal so far go to one replica
MOST_AHEAD = 2  # requests that a replica may have more than the one with the fewest
_ORDER = ("system", "instructions", "messages", "prompt", "input", "text", "input_ids")


class PromptFields(FrontFields):
    """Fields of a body that choose its replica: each field as it was sent."""

    prompt_cache_key: str | None = None
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    input_ids: msgspec.Raw = msgspec.Raw()


def prompt_of(body: bytes) -> PromptFields:
    """Raises ApiError 400."""
    return decode(body, PromptFields) if body.strip() else PromptFields()


def key_of(prompt: PromptFields) -> bytes:
    """Equal for prompts that begin alike, and for those whose client says one `prompt_cache_key`."""
    if prompt.prompt_cache_key:
        return prompt.prompt_cache_key.encode(errors="replace")
    return b"".join(bytes(getattr(prompt, name)) for name in _ORDER)[:PREFIX_BYTES]


def ranked(key: bytes, queues: Mapping[str, int], avoid: Collection[str] = ()) -> list[str]:
    """All replicas, the best first.

    queues: requests of each replica by its id. Each key has an order of replicas that stays when others come or go.
    The first of it is taken unless it is more than `MOST_AHEAD` requests ahead of the shortest queue. avoid: replicas
    that could not answer this request; they come last.
    """
    if not queues:
        return []
    shortest = min(queues.values())
    return sorted(queues, key=lambda name: (name in avoid, queues[name] > shortest + MOST_AHEAD, _weight(key, name)))


def _weight(key: bytes, name: str) -> bytes:
    return hashlib.blake2b(name.encode() + b"\0" + key, digest_size=8).digest()
