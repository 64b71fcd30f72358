"""Answers with a draft layer's tokens are those of plain decoding, bit for bit, in every family that has such a layer.

The layer does its work in each way. Where a share of accepted draft tokens is named, its own are replaced by such ones.
"""

from __future__ import annotations

import pytest

from draft_models import FAMILIES, draft_flags, drafted
from drafted_answers import TIGHT, Plain, Way, check, plain
from recorded_steps import tiny_parts


@pytest.fixture(scope="module")
def made(tiny_models, tmp_path_factory):
    folder, kept = tmp_path_factory.mktemp("answers"), dict[str, Plain]()

    def make(variant: str) -> Plain:
        if variant not in kept:
            path = drafted(tiny_models[variant], folder / variant).path
            without = {"speculative_algorithm": None, "disable_speculative_governor": False}
            alone, whole = (tiny_parts(path, folder, **draft_flags(page_size=8) | more) for more in (without, {}))
            kept[variant] = plain(alone, whole)
        return kept[variant]

    return make


WAYS = [
    Way(1, False, 1.0),
    Way(2, False, 0.5, TIGHT),
    Way(3, False, None, TIGHT),
    Way(3, False, 0.0),
    Way(3, False, 1.0, TIGHT),
    Way(3, True, 0.5, TIGHT),
    Way(3, True, 1.0),
]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("variant", ["deepseek_v4"])
def test_deepseek_v4_answers_as_without_drafts(made, variant: str, way: Way) -> None:
    """Streams, windows and entries of several tokens: at every width, governed too, also where sequences lose pages."""
    check(made(variant), way)


@pytest.mark.parametrize("variant", [each for each in FAMILIES if each != "deepseek_v4"])
def test_every_family_answers_as_without_drafts(made, variant: str) -> None:
    check(made(variant), Way(3, False, 0.6, TIGHT))
