"""Chains as CUDA graphs compute them, here run by the CPU: copies fill what is left over, and nothing waits between."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draft_models import FAMILIES, PROMPTS, chunks_of, drafted, engine_of
from fake_model import check_pages, request
from recorded_chains import CPU, recording
from tandem.config.cuda_graphs import draft_sizes
from tandem.engine.speculation.chain_inputs import ChainInputs, ChainShape
from tandem.engine.speculation.drawn_rows import Run
from tandem.engine.speculation.gpu_chains import GpuChains


@pytest.fixture(scope="session")
def glm(tiny_models, tmp_path_factory):
    return drafted(tiny_models["glm4_moe"], tmp_path_factory.mktemp("chains") / "glm")


@pytest.mark.parametrize("variant", FAMILIES)
def test_it_guesses_what_transformers_layer_guesses(tiny_models, tmp_path: Path, variant: str) -> None:
    """Three sequences in recordings of four, of which the shorter ones end; prompts' first rows are no recording's."""
    model = drafted(tiny_models[variant], tmp_path / "model")
    engine = engine_of(model.path, tmp_path)
    used = recording(engine, (1, 4))
    asks = [request(name, prompt, max_tokens=14 + 3 * i, ignore_eos=True)
            for i, (name, prompt) in enumerate(PROMPTS.items())]  # fmt: skip
    seen = list(chunks_of(engine, *asks))
    assert len(seen) > 20 and {len(guesses) for _, guesses in seen} == {1, 2, 3}
    for tokens, guesses in seen:
        assert list(guesses) == model.chain(tokens, len(guesses))
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
    for tokens, guesses in seen:
        assert list(guesses) == glm.chain(tokens, len(guesses))
    check_pages(engine)


def test_a_chain_of_one_guess(glm, tmp_path: Path) -> None:
    engine = engine_of(glm.path, tmp_path, speculative_num_steps=1)
    used = recording(engine, (1,), rows=4)
    seen = list(chunks_of(engine, request("a", PROMPTS["a"], max_tokens=9, ignore_eos=True)))
    assert len(seen) > 5 and used.count(1) >= len(seen) - 1
    assert all(list(guesses) == glm.chain(tokens, 1) for tokens, guesses in seen)


def test_without_memory_for_recordings_guesses_are_drawn_alone(glm, tmp_path: Path, monkeypatch) -> None:
    def full(chains, shape, pool):
        raise torch.OutOfMemoryError("made up")

    monkeypatch.setattr(GpuChains, "_captured", full)
    engine = engine_of(glm.path, tmp_path)
    used = recording(engine, (1, 4))
    seen = list(chunks_of(engine, request("a", PROMPTS["a"], max_tokens=9, ignore_eos=True)))
    assert len(seen) > 2 and used and engine._speculation._drafter._chain._recorded == []
    assert all(list(guesses) == glm.chain(tokens, len(guesses)) for tokens, guesses in seen)


def test_who_goes_on_no_further_is_a_copy_of_one_that_does() -> None:
    inputs = ChainInputs(ChainShape(4, 3, 3, 5, 4), CPU)

    class Held:
        num_pages, page_table, slot = 3, torch.tensor([7, 2, 9]).numpy(), 4

    inputs.fill([Run(Held, 6, [11, 12], True), Run(Held, 9, [13], True)], [1, 3])
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


def test_graphs_of_guesses_are_as_many_as_steps_can_verify() -> None:
    assert draft_sizes((), 3) == ()
    assert draft_sizes((1, 2, 3, 4), 3) == (1,)
    assert draft_sizes((1, 2, 4, 8, 32), 3) == (1, 2, 4, 8)
    assert draft_sizes((1, 128), 3)[-1] == 32
