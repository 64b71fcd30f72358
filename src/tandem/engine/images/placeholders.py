"""`with_rows`: the rows of images in a prompt's ids."""

from __future__ import annotations

from collections.abc import Sequence


def with_rows(ids: list[int], placeholder: int, rows: Sequence[int]) -> tuple[list[int], list[int]]:
    """The ids with each placeholder as often as its image has rows, and where each image begins. Raises ValueError
    where there are more or fewer placeholders than images: none may stand for another."""
    if (places := ids.count(placeholder)) != len(rows):
        raise ValueError(f"{places} placeholders for {len(rows)} images")
    longer, firsts, at = list[int](), list[int](), 0
    for count in rows:
        place = ids.index(placeholder, at)
        longer += ids[at:place]
        firsts.append(len(longer))
        longer += [placeholder] * count
        at = place + 1
    return longer + ids[at:], firsts
