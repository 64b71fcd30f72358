"""Recorded decode steps: the same bits as the operations themselves, and no recording where something would be lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sessions import PAGES, Session
from tandem import _core
from tandem.errors import KernelError
from tandem.kernels.cpu_ops import CpuOps
from tandem.models import model as decoder
from tiny import VARIANTS, save_tiny, settings

TIER = _core.supported_tiers()[-1]


def ops() -> CpuOps:
    return CpuOps(_core.WorkerPool([-1, -1]), TIER)


def decode(session: Session, steps: int = 5) -> list[torch.Tensor]:
    """Three sequences of different lengths, then `steps` steps of one token each, in changing order; then as many rows
    of fewer sequences, as steps with drafts have."""
    got = [session.step([(s, list(range(5 + s, 9 + 3 * s)))])[0] for s in range(3)]
    for i in range(steps):
        order = [(i + s) % 3 for s in range(3)]
        got += session.step([(s, [11 * i + s]) for s in order])
    got += session.step([(1, [7, 8, 9])])
    return got + session.step([(2, [17, 18]), (0, [3])])


def test_a_recording_does_not_load_the_compiler():
    """torch._dynamo is a fifth of a start's CPU time, and nothing is compiled."""
    code = """if True:
        import sys, torch
        from tandem.kernels.recorded import OnlyAllocations
        with OnlyAllocations() as calls:
            torch.empty_like(torch.zeros(2)).view(1, 2)
        print(calls.others, 'torch._dynamo' in sys.modules)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "['zeros'] False\n", done.stderr


def steps_of(session: Session) -> list[object]:
    return list(session.model._recorded.values())


@pytest.fixture(scope="module")
def latent(tmp_path_factory) -> dict[str, Path]:
    """DeepSeek models whose heads are whole panels, as those that people have: nothing between them is padded."""
    sizes = settings(kv_lora_rank=64, v_head_dim=32, qk_nope_head_dim=32, qk_rope_head_dim=16)
    made = {}
    for name in ("deepseek_v3", "deepseek_v2-greedy", "deepseek_v32", "glm_moe_dsa"):
        family, changes = VARIANTS[name]
        VARIANTS[f"{name}-panels"] = (family, changes | sizes)
        made[f"{name}-panels"] = tmp_path_factory.mktemp("latent") / name
        save_tiny(f"{name}-panels", made[f"{name}-panels"])
        del VARIANTS[f"{name}-panels"]
    return made


@pytest.mark.parametrize(
    "variant", [f"{name}-panels" for name in ("deepseek_v3", "deepseek_v2-greedy", "deepseek_v32", "glm_moe_dsa")]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_latent_attention_is_recorded(latent, monkeypatch, variant: str, dtype: str) -> None:
    """Where tokens are chosen, sequences outgrow the number that are, while their steps are repeated."""
    test_a_recorded_step_gives_the_same_bits(latent, monkeypatch, variant, dtype)


@pytest.mark.parametrize("dtype", ["float32"])
@pytest.mark.parametrize("variant", ["glm4_moe", "qwen3_moe-tied", "mixtral-window", "lfm2_moe", "nemotron_h"])
def test_a_recorded_step_gives_the_same_bits(tiny_models, monkeypatch, variant: str, dtype: str) -> None:
    recorded = Session(tiny_models[variant], dtype, ops=ops())
    got = decode(recorded)
    assert set(recorded.model._recorded) == {3, 4, 6, 8} and None not in steps_of(recorded)
    monkeypatch.setattr(decoder, "RECORDED_ROWS", 0)
    plain = Session(tiny_models[variant], dtype, ops=ops())
    expected = decode(plain)
    assert not steps_of(plain)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_what_torch_computes_is_not_recorded(tiny_models) -> None:
    session = Session(tiny_models["olmoe-clip"], ops=ops())  # clamps with torch
    decode(session)
    assert set(steps_of(session)) == {None}


def test_another_cache_gets_recordings_of_its_own(tiny_models) -> None:
    session, other = (Session(tiny_models["glm4_moe"], ops=ops()) for _ in range(2))
    expected = decode(other)
    decode(session)
    session.states = [tuple(array.clone() for array in arrays) for arrays in session.states]
    session.lengths = [0, 0, 0]
    assert all(torch.equal(a, b) for a, b in zip(decode(session), expected, strict=True))


def test_a_bad_index_is_refused_and_the_next_step_goes_on(tiny_models) -> None:
    session, other = (Session(tiny_models["glm4_moe"], ops=ops()) for _ in range(2))
    decode(session), decode(other)
    before, session.pages = session.lengths[0], 3 * PAGES + 1  # page numbers beyond the cache
    session.lengths[0] = 4 * PAGES  # beyond the sequence's own pages: its slot is in no page of the cache
    with pytest.raises(KernelError, match="outside the KV cache"):
        session.step([(0, [1])])
    session.lengths[0], session.pages = before, PAGES
    assert torch.equal(session.step([(0, [1])])[0], other.step([(0, [1])])[0])


def test_two_recordings_at_once_are_refused() -> None:
    with _core.Recording(), pytest.raises(KernelError, match="being made"), _core.Recording():
        pass
    with _core.Recording() as again:
        pass
    assert len(again) == 0
