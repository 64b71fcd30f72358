"""What mechanisms answer for themselves, for every named model: GPU kernels that are missing, cuts, caches, graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tandem.bench.architectures import CONFIGS, named_config
from tandem.mechanisms import cost
from tandem.mechanisms.cost import cost_of
from tandem.mechanisms.slices import has_part, slice_of
from tandem.planner.gpu_plan import without_kernels
from tandem.spec.gpu_scratch import StepSize
from tandem.spec.model_config import ModelConfig
from tandem.spec.stored import UNQUANTISED


def parts_of(model: ModelConfig) -> dict[object, None]:
    blocks = [block for layer in model.layers for block in layer.blocks]
    hypers = [block.hyper for block in blocks if block.hyper is not None]
    return dict.fromkeys([*(block.body for block in blocks), *hypers])


@pytest.fixture
def fresh() -> Iterator[None]:
    cost_of.cache_clear()
    yield
    cost_of.cache_clear()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_missing_folder_is_one_refusal_by_name(name: str, monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    """So a mechanism can land on the CPU first: nothing else needs to know that it has no GPU kernels."""
    model = named_config(name, None)
    if without_kernels(model):
        return
    for part in parts_of(model):
        if cost_of(part).needs_kernels:
            lacking = slice_of(part)
            monkeypatch.setattr(cost, "has_part", lambda shape, _, lacking=lacking: slice_of(shape) != lacking)
            assert without_kernels(model) == f"there are no GPU kernels for {type(part).__name__}"
            monkeypatch.setattr(cost, "has_part", has_part)
    assert not without_kernels(model)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_mechanism_answers(name: str) -> None:
    """Nothing is negative; what one of two ranks has is of the same kind; pages are as they are asked for, or kept."""
    step, model = StepSize(512, 4096, 4), named_config(name, None)
    for part in parts_of(model):
        own = cost_of(part)
        numbers = [
            own.scratch_bytes(step, model.hidden, 0), own.decode_sums_bytes(8), own.row_bytes, own.between_bytes,
            own.number_params, own.unread(4096), own.kernels, own.launches, own.flops(4, 100, True),
            own.flops(4, 100, False), own.prompt_seconds(512, 1000.0), own.sums,
        ]  # fmt: skip
        assert all(number >= 0 for number in numbers), part
        assert type(own.cut(2)) is type(part) and own.cut(1) == part
        assert all(limit.size > 0 for limit in own.limits(1, UNQUANTISED))
        narrow = own.with_cache("float8_e4m3fn")
        assert narrow is None or replace(narrow, cached="act") == part
        assert own.chosen_by is None or own.reads_choice
