"""A prompt's pass on a stream of its own, between whose layers graphs of other sequences are replayed."""

from __future__ import annotations

import pytest
import torch

from gpu import needs_cuda
from gpu_sessions import DECODED, PROMPT, Session, batch_of, on_the_cpu, rms
from tandem import LLM
from tandem.engine.protocol import SamplingSettings

pytestmark = [pytest.mark.gpu, needs_cuda]
SIX = list(range(6))


class Passing:
    """Sequence 7's prompt on its way. seconds: of a slice, where the CPU has a part in it; elsewhere a thread gives
    pieces while graphs run."""

    def __init__(self, session: Session, seconds: float) -> None:
        self.paused = session.runner.paused(batch_of([7], 0, PROMPT))
        self.seconds, self.logits = seconds, None
        assert self.paused is not None

    def go_on(self, whole: bool = False) -> None:
        """Until it ends: then its logits are fetched at once."""
        if self.logits is None and self.paused.go_on(self.seconds, whole=whole):
            self.logits = self.paused.logits().logits.cpu().clone()


def beside(session: Session, seconds: float, inside: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of sequence 7's prompt, and of the tokens that six others decode meanwhile. inside: slices are given while
    a step runs, and the pass ends there; else between steps."""
    session.step(SIX, 0, PROMPT)
    passing, decoded = Passing(session, seconds), list[torch.Tensor]()
    with torch.inference_mode():
        while len(decoded) < DECODED and (passing.logits is None or not decoded):
            meanwhile = {"host_work": passing.go_on} if inside else {}
            found = session.runner.logits(batch_of(SIX, PROMPT + len(decoded), 1), **meanwhile)
            decoded.append(found.logits.cpu().clone())
            if not inside:
                passing.go_on()
        passing.go_on(whole=True)
    assert decoded and passing.logits is not None
    return passing.logits, torch.stack(decoded, 1)


@pytest.mark.parametrize(("seconds", "inside"), [(0.0, False), (0.0, True), (1e-3, False)])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("variant", ["qwen3_moe-gpu", "glm4_moe", "deepseek_v3", "qwen3_next"])
def test_steps_and_a_pass_leave_each_other_alone(tiny_models, variant, share, seconds, inside) -> None:
    """Bits of a pass are those of a step of its rows; of the graphs, those without a pass."""
    path = tiny_models[variant]
    exact, theirs = on_the_cpu(path, "float32"), on_the_cpu(path, "bfloat16")
    prompt, decoded = beside(session := Session(path, share, (1, 8)), seconds, inside)
    after = session.step([7], PROMPT, 1)
    plain = Session(path, share, (1, 8))
    plain.step(SIX, 0, PROMPT)
    steps = torch.cat([plain.step(SIX, PROMPT + i, 1) for i in range(decoded.shape[1])], 1)
    assert torch.equal(decoded, steps) and torch.equal(prompt, plain.step([7], 0, PROMPT)[0])
    assert torch.equal(after, plain.step([7], PROMPT, 1))
    assert rms(prompt, exact[7, :PROMPT]) < 1.5 * rms(theirs, exact)


@pytest.mark.parametrize(("seconds", "inside"), [(0.0, False), (0.0, True)])
@pytest.mark.parametrize("variant", ["qwen3_moe-gpu", "qwen3_next"])
def test_experts_that_move_wait_for_a_pass(tiny_models, variant, seconds, inside) -> None:
    """They change places before it and after it. Its numbers, and those of the steps beside it, are as near to float32
    as the CPU's bfloat16."""
    path = tiny_models[variant]
    exact, theirs = on_the_cpu(path, "float32"), on_the_cpu(path, "bfloat16")
    session = Session(path, 0.5, (1, 8), moving=True)
    live = session.runner._live
    assert live is not None
    for turn in range(4):
        prompt, decoded = beside(session, seconds, inside)
        assert rms(prompt, exact[7, :PROMPT]) < 1.5 * rms(theirs, exact), turn
        count = decoded.shape[1]
        assert rms(decoded, exact[:6, PROMPT : PROMPT + count]) < 1.5 * rms(theirs, exact), turn
        for each in range(3):
            session.step(SIX, PROMPT + each, 1)
    assert live.times().exchanges > 4


def test_what_experts_are_asked_for_counts_once(tiny_models) -> None:
    session = Session(tiny_models["qwen3_moe-gpu"], 0.5, (1, 8))
    _, decoded = beside(session, 0.0)
    total = session.usage.read().tokens
    rows = 6 * PROMPT + PROMPT + 6 * decoded.shape[1]
    assert (total.sum(1) == 3 * rows).all()


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_dropped_pass_can_be_begun_again(tiny_models, share) -> None:
    session = Session(tiny_models["qwen3_moe-gpu"], share, (1, 8))
    paused = session.runner.paused(batch_of([7], 0, PROMPT))
    assert paused is not None
    paused.go_on(0.0, False)
    paused.drop()
    whole = session.step([7], 0, PROMPT)[0]
    prompt, _ = beside(session, 0.0)
    assert torch.equal(prompt, whole)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_an_engine_decodes_beside_long_prompts(tiny_models, share) -> None:
    """Greedy answers where logits differ enough: of the same tokens as one request after the other."""
    generator = torch.Generator().manual_seed(4)
    prompts = torch.randint(256, (4, 60), generator=generator).tolist()
    llm = LLM(
        str(tiny_models["qwen3_moe-gpu"]), kt_gpu_experts_ratio=share, kt_cpuinfer=2, max_total_tokens=1024,
        disable_radix_cache=True,
    )  # fmt: skip
    greedy = SamplingSettings(temperature=0.0, max_tokens=20, ignore_eos=True)
    alone = [llm.generate([p], greedy, progress=False)[0].token_ids for p in prompts]
    taken: list[int] = []
    take = llm.engine._aside.take

    def counted(chunks):
        left = take(chunks)
        taken.append(len(chunks) - len(left))
        return left

    llm.engine._aside.take = counted
    llm.engine.add(_request("first", prompts[0], 20))
    got = {"first": [], "b": [], "c": [], "d": []}
    for turn in range(200):
        if turn in (2, 4, 6):
            llm.engine.add(_request("bcd"[turn // 2 - 1], prompts[turn // 2], 20))
        for output in llm.engine.step():
            assert output.error is None
            got[output.id] += output.token_ids
    assert sum(taken) == 3 and [len(ids) for ids in got.values()] == [20] * 4
    same = sum(a == b for ids, one in zip(got.values(), alone, strict=True) for a, b in zip(ids, one, strict=True))
    assert same >= 60  # bfloat16 may turn a token, and all after it differ


def _request(name: str, prompt: list[int], tokens: int):
    from tandem.engine.protocol import GenerateRequest

    sampling = SamplingSettings(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return GenerateRequest(id=name, prompt_ids=prompt, sampling=sampling)
