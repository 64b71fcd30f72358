"""`--kv-cache-dtype`: what it takes, where it is refused, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plans import GIB, MODEL, machine, plan, reason, with_gpu
from tandem.errors import ConfigError
from tandem.machine.machine import Machine
from tandem.mechanisms.grouped_query.shape import Gqa
from tandem.mechanisms.latent.shape import Latent
from tandem.spec.state import Pages


def ada(capability: tuple[int, int] = (8, 9)) -> Machine:
    found = with_gpu(free=4 * GIB)
    return replace(found, gpus=(replace(found.gpus[0], capability=capability),))


def test_half_the_bytes_hold_twice_the_tokens() -> None:
    usual, small = (
        plan(ada(), MODEL, kt_gpu_experts_ratio=0.0, max_total_tokens=None, kv_cache_dtype=dtype)
        for dtype in ("auto", "fp8_e4m3")
    )
    assert usual.ledgers[0].entries and small.ledgers[0].entries
    bytes_of = [
        next(e.nbytes for e in p.ledgers[0].entries if e.name == "KV cache") / (p.num_pages * p.page_size)
        for p in (usual, small)
    ]
    assert bytes_of[0] == 2 * bytes_of[1]
    assert "lossy" in reason(small, "KV cache dtype") and not any(d.name == "KV cache dtype" for d in usual.decisions)


def test_start_up_says_how_to_measure_it() -> None:
    (said,) = [n for n in plan(ada(), kv_cache_dtype="fp8_e4m3").notices if "--kv-cache-dtype" in n]
    assert "lossy" in said and "kt quality demo --kv-cache-dtype fp8_e4m3" in said


@pytest.mark.parametrize(
    ("machine_", "flags", "why"),
    [
        (machine(), {}, "the CPU reads keys in the activations' dtype"),
        (ada(), {"device": "cpu"}, "the CPU reads keys in the activations' dtype"),
        (ada((8, 0)), {}, "compute capability 8.0, and 8.9 or newer"),
    ],
)
def test_where_it_cannot_be(machine_: Machine, flags: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        plan(machine_, kv_cache_dtype="fp8_e4m3", **flags)


def test_backends_that_do_not_read_it() -> None:
    with_torch = replace(ada(), torch="2.13.0")
    with pytest.raises(ConfigError, match="--attention-backend triton"):
        plan(with_torch, kv_cache_dtype="fp8_e4m3", attention_backend="torch", page_size=256)


def test_bf16_is_what_there_is_anyway() -> None:
    assert plan(machine(), kv_cache_dtype="bf16") == plan(machine(), kv_cache_dtype="auto")
    with pytest.raises(ConfigError, match="take --dtype bfloat16"):
        plan(machine(), kv_cache_dtype="bf16", dtype="float32")


def test_an_unknown_name_lists_those_that_are() -> None:
    with pytest.raises(ConfigError, match="fp8_e4m3"):
        plan(machine(), kv_cache_dtype="fp8_e5m2")


def test_only_keys_and_values_change() -> None:
    from tandem.flags.engine_config import EngineConfig
    from tandem.planner.choices.cached import cached_as

    config = EngineConfig(model="demo", kv_cache_dtype="fp8_e4m3")
    changed = cached_as(config, MODEL)
    mixers = [mixer for mixer in changed.mixers if isinstance(mixer, Gqa)]
    assert mixers and all(mixer.cached == "float8_e4m3fn" for mixer in mixers)
    assert [replace(m, cached="act") if isinstance(m, Gqa) else m for m in changed.mixers] == list(MODEL.mixers)
    pages = [state for state in changed.states if isinstance(state, Pages)]
    assert {array.dtype for state in pages for array in state.rows} == {"float8_e4m3fn"}
    assert not any(isinstance(mixer, Latent) for mixer in changed.mixers)


def test_quality_measures_it_beside_the_usual_cache(tmp_path) -> None:
    from tandem.cli.quality_run import QualityFlags

    found = QualityFlags(model="demo", cached="fp8_e4m3").variants(tmp_path)
    assert [label for label, _ in found] == ["as stored, 0% on the GPU, KV cache fp8_e4m3", "as stored, 0% on the GPU"]
    assert [variant.cached for _, variant in found] == ["fp8_e4m3", "auto"]
    halves = QualityFlags(model="demo", cached="fp8_e4m3", gpu_shares=(0.5, 1.0)).variants(tmp_path)
    assert [variant.gpu_share for _, variant in halves] == [0.5, 0.5, 1.0, 1.0]
