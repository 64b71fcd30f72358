"""Chains as CUDA graphs compute them, here run by the CPU: copies fill what is left over, and nothing waits between."""

from __future__ import annotations

import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import cycle_times
from covering import one_of_each_type
from draft_models import FAMILIES, PROMPTS, chunks_of, drafted, engine_of
from fake_model import check_pages, request
from recorded_chains import CPU, recording
from tandem.engine.speculation.draft_batch import DraftRows
from tandem.engine.speculation.gpu_rollout import GpuRollouts
from tandem.engine.speculation.rollout_inputs import RolloutInputs, RolloutShape
from tandem.planner.cuda_graphs import draft_sizes
from tiny import VARIANTS


@pytest.fixture(scope="session")
def glm(tiny_models, tmp_path_factory):
    return drafted(tiny_models["glm4_moe"], tmp_path_factory.mktemp("chains") / "glm")


@pytest.mark.parametrize("variant", one_of_each_type({each: VARIANTS[each] for each in FAMILIES}))
def test_it_drafts_what_transformers_layer_drafts(tiny_models, tmp_path: Path, variant: str) -> None:
    """Three sequences in recordings of four, of which the shorter ones end; prompts' first rows are no recording's."""
    model = drafted(tiny_models[variant], tmp_path / "model")
    engine = engine_of(model.path, tmp_path)
    used = recording(engine, (1, 4))
    asks = [request(name, prompt, max_tokens=14 + 3 * i, ignore_eos=True)
            for i, (name, prompt) in enumerate(PROMPTS.items())]  # fmt: skip
    seen = list(chunks_of(engine, *asks))
    assert len(seen) > 20 and {len(draft_tokens) for _, draft_tokens in seen} == {1, 2, 3}
    for tokens, draft_tokens in seen:
        assert list(draft_tokens) == model.chain(tokens, len(draft_tokens))
    assert set(used) >= {1, 2, 3} and used.count(0) <= len(asks)
    check_pages(engine)


def test_pages_that_are_shared_or_lost_are_drawn_alone(glm, tmp_path: Path) -> None:
    engine = engine_of(glm.path, tmp_path, max_total_tokens=96)
    used = recording(engine, (1, 2, 4, 8))
    asks = [request(name, prompt, max_tokens=20, n=2, temperature=1.0, seed=3, ignore_eos=True)
            for name, prompt in PROMPTS.items()]  # fmt: skip
    seen = list(chunks_of(engine, *asks))
    for cut in (35, 36, 37):
        both = [request(f"{cut}{i}", [*PROMPTS["c"][:cut], 5 + i, 9], max_tokens=9, ignore_eos=True) for i in range(2)]
        seen += chunks_of(engine, *both)
    assert engine.stats().preemptions > 0 and used.count(0) > 3 and len(used) - used.count(0) > 20
    for tokens, draft_tokens in seen:
        assert list(draft_tokens) == glm.chain(tokens, len(draft_tokens))
    check_pages(engine)


def test_a_chain_of_one_draft_token(glm, tmp_path: Path) -> None:
    engine = engine_of(glm.path, tmp_path, speculative_num_steps=1)
    used = recording(engine, (1,), rows=4)
    seen = list(chunks_of(engine, request("a", PROMPTS["a"], max_tokens=9, ignore_eos=True)))
    assert len(seen) > 5 and used.count(1) >= len(seen) - 1
    assert all(list(draft_tokens) == glm.chain(tokens, 1) for tokens, draft_tokens in seen)


def test_without_memory_for_recordings_drafts_are_drawn_alone(glm, tmp_path: Path, monkeypatch) -> None:
    def full(chains, shape, pool):
        raise torch.OutOfMemoryError("made up")

    monkeypatch.setattr(GpuRollouts, "_captured", full)
    engine = engine_of(glm.path, tmp_path)
    used = recording(engine, (1, 4))
    seen = list(chunks_of(engine, request("a", PROMPTS["a"], max_tokens=9, ignore_eos=True)))
    assert len(seen) > 2 and used and engine._speculation._drafter._chain._recorded == []
    assert all(list(drafts) == glm.chain(tokens, len(drafts)) for tokens, drafts in seen)


def test_who_goes_on_no_further_is_a_copy_of_one_that_does() -> None:
    inputs = RolloutInputs(RolloutShape(4, 3, 3, 5, 4), CPU)

    class Held:
        num_pages, page_table, slot = 3, torch.tensor([7, 2, 9]).numpy(), 4

    inputs.fill([DraftRows(Held, 6, [11, 12], True), DraftRows(Held, 9, [13], True)], [1, 3])
    inputs.send()
    assert inputs.order.tolist() == [[0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]
    assert inputs.ids.view(4, 3).tolist() == [[11, 11, 12], [13] * 3, [13] * 3, [13] * 3]
    assert inputs.positions.view(4, 3)[:2].tolist() == [[6, 6, 7], [9, 9, 9]]
    assert inputs.places.view(4, 3)[:2].tolist() == [[2 * 4 + 2, 2 * 4 + 2, 2 * 4 + 3], [9 * 4 + 1] * 3]
    first = inputs.first()
    assert first.logits_rows.tolist() == [2, 5, 8, 11] and first.seq_lens.tolist()[:3] == [7, 7, 8]
    assert first.slots.tolist() == [4] * 12
    later = inputs.next(torch.tensor([1, 2, 3, 4]), torch.tensor([8, 10, 10, 10]), torch.tensor([0, 1, 1, 1]))
    assert later.cache_slots.tolist() == [9 * 4, 9 * 4 + 2, 9 * 4 + 2, 9 * 4 + 2]


def test_images_follow_each_other() -> None:
    """Whatever the one before held: rows over the ends of pages, and widths that stay or change."""
    chance, inputs = random.Random(4), RolloutInputs(RolloutShape(3, 6, 3, 5, 4), CPU)
    for _ in range(200):
        runs, widths = [], chance.choice([[3, 3], [1, 3], [2]])
        for _ in widths:
            count, pages = chance.randint(1, 6), chance.randint(3, 5)
            first = chance.randint(0, 4 * pages - count)
            table = torch.tensor(chance.sample(range(1, 90), pages)).numpy()
            held = SimpleNamespace(num_pages=pages, page_table=table, slot=chance.randint(1, 9))
            runs.append(DraftRows(held, first, chance.choices(range(99), k=count), True))
        inputs.fill(runs, widths)
        inputs.send()
        for at, run in enumerate([*runs, *[runs[-1]] * 2][:3]):
            places = [min(max(0, row - 6 + len(run.tokens)), len(run.tokens) - 1) for row in range(6)]
            positions, table = [run.first + place for place in places], run.sequence.page_table
            rows, own = slice(6 * at, 6 * at + 6), run.sequence
            assert inputs.ids[rows].tolist() == [run.tokens[place] for place in places]
            assert inputs.positions[rows].tolist() == positions
            assert inputs.places[rows].tolist() == [int(table[each // 4]) * 4 + each % 4 for each in positions]
            assert inputs.tables[at, : own.num_pages].tolist() == table.tolist() and inputs.slots[at] == own.slot
        wanted = [*widths, *[0] * (3 - len(widths))]
        longest = wanted.index(max(wanted))
        assert inputs.order.tolist() == [[i if wanted[i] > d else longest for i in range(3)] for d in range(3)]


def test_graphs_of_drafts_are_as_many_as_steps_can_verify() -> None:
    assert draft_sizes((), 3) == ()
    assert draft_sizes((1, 2, 3, 4), 3) == (1,)
    assert draft_sizes((1, 2, 4, 8, 32), 3) == (1, 2, 4, 8)
    assert draft_sizes((1, 128), 3)[-1] == 32


def test_what_the_host_does_meanwhile_can_be_timed(capsys) -> None:
    cycle_times.main(tokens=80)
    assert len(re.findall(r": \d+ us, the least \d+$", capsys.readouterr().out, re.MULTILINE)) == 2


def test_a_prompt_s_last_rows_are_a_recording_s(glm, tmp_path: Path) -> None:
    """One pass makes those before them, and drafts nothing. So an answer's first drafts take one pass more than
    others, however many they are."""
    engine = engine_of(glm.path, tmp_path)
    recording(engine, (1,))
    chains, passes = engine._speculation._drafter._chain, []
    alone = chains._unrecorded.chains

    def noted(runs, widths):
        passes.append(([len(run.tokens) for run in runs], list(widths)))
        return alone(runs, widths)

    chains._unrecorded.chains = noted
    seen = list(chunks_of(engine, request("c", PROMPTS["c"], max_tokens=12, ignore_eos=True)))
    assert passes == [([len(PROMPTS["c"]) - 8], [])]
    assert len(seen) > 2 and all(list(drafts) == glm.chain(tokens, len(drafts)) for tokens, drafts in seen)
