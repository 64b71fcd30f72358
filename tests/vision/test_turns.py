"""Where rows of prompts with images turn: in batches, in what graphs read, and which path they take."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tandem.engine.graphs.inputs import GraphInputs, GraphPlan
from tandem.engine.graphs.pool import GraphPool
from tandem.engine.graphs.prefill_graphs import ChunkInputs
from tandem.engine.protocol import SamplingSettings
from tandem.engine.sequence import Chunk, Sequence, show
from tandem.engine.step.batch import BatchArrays, moved
from tandem.engine.step.path import Path, background_path_of, path_of
from tandem.engine.vision.rows import ImageRows
from tandem.models import ForwardBatch
from tandem.planner.host_memory import graph_input_bytes
from tandem.spec.vision import Tower
from tiny_seeing import PROCESSOR, Prompt, image, oracle, prompt, save_seeing, text

PAGE, CPU, REGION = 4, torch.device("cpu"), 1000
TOWER = Tower(1, 48, 4, 68, 6, 72, placeholder=258, start=260, end=261, processor=PROCESSOR)
ASKED = prompt(text(3), image(16, 24), text(2), image(8, 40, 1), text(4))  # 6 and 5 pieces


def sequence(asked: Prompt, computed: int = 0) -> Sequence:
    made = Sequence("a", 0, list(asked.ids), SamplingSettings(), arrival=0, max_len=64, page_size=PAGE, seed=0)
    show([made], asked.images, TOWER)
    made.add_pages(list(range(16)))
    made.computed_len = made.state_len = computed
    if made.images is not None:
        for number, each in enumerate(asked.images):
            rows = torch.arange(each.rows)[:, None, None]
            made.images.features[number] = (number + rows / 16).expand(-1, 1, 2)
    return made


def filled(*chunks: Chunk, images_from: int = REGION) -> ForwardBatch:
    return BatchArrays(PAGE, 64, images_from=images_from).fill(list(chunks))


def test_places_are_those_of_transformers(tmp_path) -> None:
    save_seeing("qwen3_vl_moe", tmp_path / "a")
    ids = torch.tensor([ASKED.ids])
    grids = torch.tensor([each.grid for each in ASKED.images])
    theirs, shift = oracle(tmp_path / "a").model.get_rope_index(ids, (ids == 258).int(), image_grid_thw=grids)
    rows = ImageRows(ASKED.images, len(ASKED.ids), 2)
    assert torch.equal(torch.from_numpy(rows.places(0, len(ASKED.ids))), theirs[:, 0].T)
    assert rows.shift == int(shift)
    behind = rows.places(len(ASKED.ids) - 1, 3)
    assert behind.tolist() == [[len(ASKED.ids) - 1 + i + rows.shift] * 3 for i in range(3)]


def test_pieces_turn_in_the_region_and_text_behind_them_earlier() -> None:
    batch = filled(Chunk(sequence(ASKED), len(ASKED.ids), 1))
    turns = batch.turns.tolist()
    assert turns[:3] == [0, 1, 2] and turns[3:9] == list(range(REGION, REGION + 6)) and turns[9:11] == [6, 7]
    assert turns[11:16] == list(range(REGION + 6, REGION + 11)) and turns[16:] == [13, 14, 15, 16]
    assert batch.positions.tolist() == list(range(20))
    assert batch.image_rows.rows.tolist() == [*range(3, 9), *range(11, 16)] and batch.image_rows.first == REGION
    assert batch.image_rows.features[:, 0, 0].tolist() == [i / 16 for i in range(6)] + [1 + i / 16 for i in range(5)]


@pytest.mark.parametrize("cut", range(1, 20))
def test_chunks_have_what_the_whole_has(cut: int) -> None:
    whole = filled(Chunk(sequence(ASKED), 20, 1))
    first, rest = filled(Chunk(sequence(ASKED), cut, 1)), filled(Chunk(sequence(ASKED, cut), 20 - cut, 1))
    found = [batch.image_rows for batch in (first, rest) if batch.image_rows is not None]
    assert torch.equal(torch.cat([seen.features for seen in found]), whole.image_rows.features)
    assert torch.equal(torch.cat([seen.places for seen in found]), whole.image_rows.places)
    text_rows = whole.turns < REGION
    assert torch.equal(torch.cat([first.turns, rest.turns])[text_rows], whole.turns[text_rows])


def test_a_batch_of_text_is_as_without_a_tower() -> None:
    plain = Chunk(sequence(prompt(text(9))), 9, 1)
    batch, before = filled(plain), filled(plain, images_from=0)
    assert batch.turns is None and batch.image_rows is None and batch.turning is batch.positions
    for field in dataclasses.fields(ForwardBatch):
        one, other = getattr(batch, field.name), getattr(before, field.name)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_what_is_moved_is_moved_whole() -> None:
    batch = filled(Chunk(sequence(prompt(text(2))), 2, 0), Chunk(sequence(ASKED), 12, 1))
    there = moved(batch, CPU)
    assert torch.equal(there.turns, batch.turns) and torch.equal(there.image_rows.rows, batch.image_rows.rows)
    assert batch.image_rows.rows.tolist() == [*range(5, 11), 13]


def test_graphs_read_turns() -> None:
    plan = GraphPlan((4,), 16, images_from=REGION)
    inputs = GraphInputs(4, plan, CPU)
    assert inputs._layout.nbytes == graph_input_bytes(4, 16, turning=True)
    behind, plain = sequence(ASKED, 20), sequence(prompt(text(9)), 9)
    behind.tokens.append(1)
    plain.tokens.append(1)
    inputs.fill(filled(Chunk(plain, 1, 1), Chunk(behind, 1, 1)))
    assert inputs.image.turns.tolist() == [9, 17, 17, 17]
    inputs.fill(filled(Chunk(plain, 1, 1)))
    assert inputs.image.turns.tolist() == [9, 9, 9, 9]
    chunk = ChunkInputs(6, 16, CPU, turning=True)
    chunk.fill(filled(Chunk(sequence(ASKED, 16), 4, 1)))
    assert chunk.image.turns.tolist() == [13, 14, 15, 16, 16, 16]


def test_pieces_are_computed_kernel_by_kernel() -> None:
    """Even one of them, which looks like a row that decodes."""
    last = sequence(prompt(text(3), image(8, 8)), 3)
    assert last.prefills and not last.decodes and Chunk(last, 1, 1).prefills
    batch, facts = filled(Chunk(last, 1, 1)), GraphPool()
    choice = path_of(batch, facts)
    assert choice.path is Path.EAGER and "pieces of images" in choice.why
    assert "pieces of images" in background_path_of(batch, facts).why
    assert "pieces of images" not in path_of(filled(Chunk(sequence(ASKED, 16), 4, 1)), facts).why
