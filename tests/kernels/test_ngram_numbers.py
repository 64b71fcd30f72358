"""Rows of a table that a step's tokens name, found by the C++ core for a GPU: those that plain torch finds, at every
cut."""

from __future__ import annotations

import pytest
import torch

from paged_batches import make_batch, random_tables
from tandem.errors import CheckpointError, KernelError
from tandem.kernels.step_rows import step_rows
from tandem.kernels.unread_rows import UnreadRows, unread_tokens
from tandem.mechanisms.ngrams.numbers import RowNumbers
from tandem.mechanisms.ngrams.shape import Ngram
from tandem.mechanisms.ngrams.torch import Hashes, NgramWeights, hashed, last_ids
from tandem.models.batch import ForwardBatch
from tandem.spec.norm import Norm
from tandem.spec.stored import RowTable

STOP = 5
SHAPE = Ngram(3, 4, RowTable(4000, 6), 4, 4, 16, STOP, Norm(1e-6, plus_one=True))
HASHES = Hashes(
    torch.tensor([3, (1 << 60) + 7, (1 << 61) + 9]), torch.tensor([97, 101, 103, 107] * 2), torch.arange(8) * 400
)
LENGTHS = (40, 300, 7)


def tokens() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(12, (n,), generator=generator) for n in LENGTHS]  # with many a STOP


def batch(spans: list[tuple[int, int]], slots: list[int], apart: bool = False) -> ForwardBatch:
    """apart: rows are sequences of their own."""
    texts = tokens()
    ids = torch.cat([texts[i][slice(*span)] for i, span in enumerate(spans)])
    if apart:
        slots = [slot for slot, (a, b) in zip(slots, spans, strict=True) for _ in range(a, b)]
        spans = [(p, p + 1) for a, b in spans for p in range(a, b)]
    made = make_batch(spans, random_tables(len(spans), 300)[0])
    return ForwardBatch(
        ids, made.positions, made.cache_slots, made.query_starts, made.seq_lens, made.block_tables,
        torch.arange(len(ids)), torch.tensor(slots, dtype=torch.int32),
    )  # fmt: skip


def exact(spans: list[tuple[int, int]]) -> torch.Tensor:
    """Numbers of whole texts at once."""
    ring = torch.zeros(4, 4, 1)
    whole = batch([(0, n) for n in LENGTHS], [1, 2, 3])
    numbers = hashed(last_ids(whole.input_ids, step_rows(whole), ring, SHAPE), HASHES, SHAPE.heads)
    starts = [0, LENGTHS[0], LENGTHS[0] + LENGTHS[1]]
    return torch.cat([numbers[start + a : start + b] for start, (a, b) in zip(starts, spans, strict=True)])


def check(numbers: RowNumbers, spans: list[tuple[int, int]], slots: list[int], apart: bool = False) -> None:
    assert torch.equal(numbers(batch(spans, slots, apart)), exact(spans))


def test_prompts_cut_anywhere_and_rows_that_decode() -> None:
    numbers, slots = RowNumbers(SHAPE, HASHES), [9, 2, 5]
    check(numbers, [(0, 1), (0, 270), (0, 2)], slots)  # longer than a ring
    check(numbers, [(1, 9), (270, 271), (2, 2)], slots)
    for i in range(5):
        check(numbers, [(9 + i, 10 + i), (271 + i, 272 + i), (2 + i, 3 + i)], slots, apart=True)


def test_rows_of_drafts_follow_each_other_in_one_slot() -> None:
    numbers, slots = RowNumbers(SHAPE, HASHES), [1, 2, 3]
    check(numbers, [(0, 8), (0, 100), (0, 1)], slots)
    check(numbers, [(8, 12), (100, 101), (1, 4)], slots, apart=True)
    check(numbers, [(9, 10), (101, 104), (2, 3)], slots, apart=True)  # some were wrong


def test_a_copy_of_a_slot_goes_on_from_there() -> None:
    numbers = RowNumbers(SHAPE, HASHES)
    check(numbers, [(0, 8), (0, 100), (0, 1)], [1, 2, 3])
    numbers.copied(2, 7)
    check(numbers, [(8, 9), (100, 130), (1, 2)], [1, 7, 3])
    check(numbers, [(9, 10), (100, 101), (2, 3)], [1, 2, 3])


def test_rows_that_fill_up_a_graph_are_left_out() -> None:
    numbers = RowNumbers(SHAPE, HASHES)
    check(numbers, [(0, 8), (0, 100), (0, 1)], [1, 2, 3])
    padded = batch([(8, 9), (100, 101), (1, 2)], [1, 0, 0])
    assert torch.equal(numbers(padded), exact([(8, 9), (100, 100), (1, 1)]))
    nobody = batch([(8, 9), (100, 101), (1, 2)], [0, 0, 0])  # before a graph is captured
    assert numbers(nobody).shape == (1, 8)


def test_one_sequence_alone_has_the_same_numbers() -> None:
    """Products leave 64 bits."""
    numbers = RowNumbers(SHAPE, HASHES)
    expected = exact([(0, LENGTHS[0]), (0, 0), (0, 0)])
    for position in range(LENGTHS[0]):
        one = batch([(position, position + 1)], [3], apart=True)
        assert torch.equal(numbers(one), expected[position : position + 1])
    assert int(tokens()[0].max()) * int(HASHES.multipliers[2]) >= 1 << 63 and STOP in tokens()[0]


def test_more_rows_of_a_slot_than_it_has_places() -> None:
    """As deterministic mode lays out a chunk. The text is longer than a ring."""
    numbers = RowNumbers(SHAPE, HASHES)
    check(numbers, [(0, 0), (0, 290), (0, 3)], [1, 2, 3], apart=True)
    check(numbers, [(0, 0), (290, 300), (3, 7)], [1, 2, 3], apart=True)


def test_numbers_of_a_text_are_those_of_its_steps() -> None:
    """From any token on, and nothing is kept."""
    numbers, text = RowNumbers(SHAPE, HASHES), tokens()[1].tolist()
    expected = exact([(0, 0), (0, LENGTHS[1]), (0, 0)])
    for first in (0, 1, 2, 3, 299):
        for end in {first, first + 1, 300}:
            assert torch.equal(numbers.of_text(text, first, end), expected[first:end])
    check(numbers, [(0, 8), (0, 0), (0, 0)], [1, 2, 3])


def test_what_fits_no_table_is_refused() -> None:
    with pytest.raises(KernelError, match="sizes and offsets do not fit"):
        RowNumbers(SHAPE, HASHES._replace(sizes=HASHES.sizes[:-1]))
    numbers = RowNumbers(SHAPE, HASHES)
    with pytest.raises(KernelError, match="a slot or a start is none"):
        numbers(batch([(0, 1), (0, 2), (0, 1)], [1, -2, 3]))


def test_a_step_s_rows_lie_staged_and_unread_ones_are_no_numbers(monkeypatch) -> None:
    """Two sequences, of which the second's last token has rows that cannot be read; copies that fill up a graph."""
    pytest.importorskip("triton")
    from tandem.mechanisms.ngrams.gpu.staged import StagedRows

    told, width = UnreadRows(), SHAPE.table.width
    monkeypatch.setattr("tandem.mechanisms.ngrams.gpu.staged.unread_rows", told)
    table = torch.arange(4000.0)[:, None].expand(-1, width).bfloat16()
    expected, bad = exact([(0, 3), (0, 2), (0, 0)]), set(exact([(0, 0), (1, 2), (0, 0)]).flatten().tolist())

    def find(numbers: torch.Tensor) -> torch.Tensor:
        if bad & set(numbers.tolist()):
            raise CheckpointError("t.safetensors: rows cannot be read: Input/output error")
        return table[numbers]

    bad -= set(expected[:4].flatten().tolist())
    unused = torch.zeros(0)
    staged = StagedRows(SHAPE, NgramWeights(HASHES, find, unused, unused, unused, None, 16), torch.device("cpu"))
    staged.begin(batch([(0, 3), (0, 2), (0, 0)], [4, 7, 2]), captured=False)
    rows = staged.rows(5)
    assert torch.equal(rows[:4], table[expected[:4]].flatten(1)) and rows[4].isnan().all()
    assert not told.take(4, 9)
    assert not told.take(7, 1), "before its first bad token"
    staged.begin(batch([(0, 3), (0, 2), (0, 0)], [4, 7, 2]), captured=False)
    assert told.take(7, 2) and not told.take(7, 2), "once"
    bad.clear()
    staged.begin(batch([(3, 4), (2, 3), (0, 1)], [4, 0, 0]), captured=True)
    image, wanted = staged._of_graphs[3].view(torch.bfloat16).view(3, -1), table[exact([(3, 4), (0, 0), (0, 0)])]
    assert torch.equal(image, wanted.flatten(1).expand(3, -1))


@pytest.mark.parametrize("bad", [set(), {0}, {6}, {2, 3}, set(range(7))], ids=str)
def test_tokens_that_cannot_be_read_alone_are_unread(bad: set[int]) -> None:
    read = list[int]()

    def some(part: slice) -> None:
        if bad & set(range(part.start, part.stop)):
            raise CheckpointError("no")
        read.extend(range(part.start, part.stop))

    assert unread_tokens(some, 7) == sorted(bad)
    assert read == [token for token in range(7) if token not in bad], "each once, in their order"
