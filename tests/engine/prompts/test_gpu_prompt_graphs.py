"""Chunks of prompts as CUDA graphs: of the same bits as kernel by kernel, whatever others decode beside them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fake_model import request
from gpu import needs_cuda
from gpu_sessions import DECODED, PROMPT, Session, batch_of, on_the_cpu, rms
from tandem import LLM
from tandem.engine.protocol import SamplingSettings
from tandem.kernels.which import ExpertPath, Reads, gpu_way
from tandem.models import ForwardBatch

pytestmark = [pytest.mark.gpu, needs_cuda]
SIX = list(range(6))
VARIANT = "qwen3_moe-gpu"


def chunk(rows: list[int], first: int, count: int, wanted: bool = True) -> ForwardBatch:
    """Logits of each sequence's last row, or of none."""
    ends = torch.arange(1, len(rows) + 1) * count - 1
    return replace(batch_of(rows, first, count), logits_rows=ends if wanted else ends[:0])


def passed(session: Session, batch: ForwardBatch, beside: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Of a pass that is replayed: its logits, and those of six others that decode meanwhile."""
    assert session.runner._prompts.graph_of(batch) is not None
    paused, decoded = session.runner.paused(batch), []
    assert paused is not None
    with torch.inference_mode():
        while not paused.go_on(0.0, whole=not beside or len(decoded) == DECODED):
            if beside and len(decoded) < DECODED:
                found = session.runner.logits(batch_of(SIX, PROMPT + len(decoded), 1))
                decoded.append(found.logits.cpu().clone())
    return paused.logits().logits.cpu().clone(), decoded


def test_a_graph_of_as_many_rows_has_the_same_bits(tiny_models) -> None:
    session = Session(tiny_models[VARIANT], 1.0, (1, 8), prompts=(PROMPT,))
    plain = Session(tiny_models[VARIANT], 1.0, (1, 8))
    for each in (session, plain):
        each.step(SIX, 0, PROMPT)
    prompt, decoded = passed(session, chunk([7], 0, PROMPT), beside=True)
    assert decoded
    for i, logits in enumerate(decoded):
        assert torch.equal(logits.view(6, 1, -1), plain.step(SIX, PROMPT + i, 1))
    assert torch.equal(prompt, plain.step([7], 0, PROMPT)[0, -1:])
    assert torch.equal(session.step([7], PROMPT, 1), plain.step([7], PROMPT, 1))


@pytest.mark.parametrize("beside", [False, True])
def test_copies_of_the_last_row_change_nothing(tiny_models, beside) -> None:
    """Chunks of 12 and 9 rows in a graph of 16; then three sequences of 7 in one of 32."""
    path = tiny_models[VARIANT]
    exact, theirs = on_the_cpu(path, "float32"), on_the_cpu(path, "bfloat16")
    session = Session(path, 1.0, (1, 8), prompts=(16, 32))
    if beside:
        session.step(SIX, 0, PROMPT)
    _, first = passed(session, chunk([7], 0, 12, wanted=False), beside)
    last, _ = passed(session, chunk([7], 12, PROMPT - 12), False)
    assert bool(first) == beside
    assert rms(last[0], exact[7, PROMPT - 1]) < 2 * rms(theirs, exact)
    again = session.step([7], PROMPT, 1)[0, 0]
    assert rms(again, exact[7, PROMPT]) < 2 * rms(theirs, exact)
    if not beside:
        several, _ = passed(session, chunk([1, 2, 3], 0, 7), False)
        assert rms(several, exact[1:4, 6]) < 2 * rms(theirs, exact)


def test_experts_with_many_rows_are_unpacked_in_a_graph_too(tiny_models) -> None:
    """Eight prompts at once: their rows take the way of prompts, in a graph of their number and in a larger one."""
    everyone, path = list(range(8)), tiny_models[VARIANT]
    plain = Session(path, 1.0, (1, 8))
    whole = plain.step(everyone, 0, PROMPT)
    exact, theirs = on_the_cpu(path, "float32"), on_the_cpu(path, "bfloat16")
    experts = plain.side.hybrids[0].gpu
    assert gpu_way(8 * PROMPT, 8 * PROMPT * 3, len(experts.slot_of), Reads(False, True)) is ExpertPath.PROMPTS
    for rows in (8 * PROMPT, 256):
        session = Session(path, 1.0, (1, 8), prompts=(rows,))
        for _ in range(2):  # what the first pass leaves in scratch is nothing to the second
            last, _ = passed(session, chunk(everyone, 0, PROMPT), False)
            assert rms(last, whole[:, -1]) <= rms(theirs, exact)
            assert rms(last, exact[:, PROMPT - 1]) < 2 * rms(theirs, exact)
        decoded, expected = session.step(everyone, PROMPT, 1), exact[:, PROMPT]
        assert rms(decoded[:, 0], expected) < 2 * rms(theirs, exact)


def test_copies_are_not_counted(tiny_models) -> None:
    session = Session(tiny_models[VARIANT], 1.0, (1, 8), prompts=(16,))
    passed(session, chunk([7], 0, 12), False)
    total = session.usage.read()
    assert (total.tokens.sum(1) == 3 * 12).all() and (total.reads <= 1).all()


def test_an_abandoned_pass_can_be_begun_again(tiny_models) -> None:
    session = Session(tiny_models[VARIANT], 1.0, (1, 8), prompts=(PROMPT,))
    paused = session.runner.paused(chunk([7], 0, PROMPT))
    assert paused is not None
    paused.go_on(0.0, False)
    paused.drop()
    plain = Session(tiny_models[VARIANT], 1.0, (1, 8))
    assert torch.equal(passed(session, chunk([7], 0, PROMPT), False)[0], plain.step([7], 0, PROMPT)[0, -1:])


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_an_engine_replays_prompts_beside_those_who_decode(tiny_models, share) -> None:
    """Greedy answers where logits differ enough: of the same tokens as without graphs. Below 1 experts are streamed."""
    prompts = torch.randint(256, (4, 60), generator=torch.Generator().manual_seed(4)).tolist()
    greedy = SamplingSettings(temperature=0.0, max_tokens=20, ignore_eos=True)
    flags = {"kt_gpu_experts_ratio": share, "kt_cpuinfer": 2, "max_total_tokens": 1024, "disable_radix_cache": True}
    flags |= {"chunked_prefill_size": 64, "kt_gpu_prefill_token_threshold": 16, "disable_dynamic_expert_update": True}
    plain = LLM(str(tiny_models[VARIANT]), disable_cuda_graph=True, **flags)
    alone = [plain.generate([prompt], greedy, progress=False)[0].token_ids for prompt in prompts]
    del plain
    llm = LLM(str(tiny_models[VARIANT]), **flags)
    if share == 1.0:
        graphs_of_tiny(llm)
    graphs = llm.engine._runner._prompts
    given, graph_of = [], graphs.graph_of

    def counted(batch, **how):
        found = graph_of(batch, **how)
        given.append(found is not None)
        return found

    graphs.graph_of = counted
    got = answers(llm, prompts)
    assert sum(given) >= 3
    pairs = [(a, b) for ids, one in zip(got, alone, strict=True) for a, b in zip(ids, one, strict=True)]
    assert len(pairs) == 80
    assert sum(a == b for a, b in pairs) >= 60  # bfloat16 may turn a token, and all after it differ


def graphs_of_tiny(llm: LLM) -> None:
    """A tiny model's context is shorter than the smallest graph that is planned."""
    runner = llm.engine._runner
    if not runner._prompts._graphs:
        runner._plan = replace(runner._plan, prompts=(64,))
        with torch.inference_mode():
            runner._capture_prompts()


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """The first is decoded while the others come."""
    from tandem.engine.protocol import GenerateRequest

    sampling = SamplingSettings(temperature=0.0, max_tokens=20, ignore_eos=True)
    got: list[list[int]] = [[] for _ in prompts]
    for turn in range(200):
        if turn in (0, 3, 6, 9):
            index = turn // 3
            llm.engine.add(GenerateRequest(id=str(index), prompt_ids=prompts[index], sampling=sampling))
        for output in llm.engine.step():
            assert output.error is None
            got[int(output.id)] += output.token_ids
    return got


def test_a_prompt_that_is_cut_when_somebody_comes_has_the_same_answer(tiny_models) -> None:
    """Before its second layer; greedy, where logits differ enough."""
    prompt = torch.randint(256, (60,), generator=torch.Generator().manual_seed(5)).tolist()
    flags = {"kt_gpu_experts_ratio": 1.0, "kt_cpuinfer": 2, "max_total_tokens": 1024, "disable_radix_cache": True}
    found = []
    for cut in (False, True):
        engine = LLM(str(tiny_models[VARIANT]), **flags).engine
        assert engine.plan.gpu is not None and engine.plan.gpu.sizes.shared_tokens == 2048
        sizes = replace(engine.plan.gpu.sizes, prompt_sizes=(16,), shared_tokens=16)
        engine.plan = replace(engine.plan, gpu=replace(engine.plan.gpu, sizes=sizes))
        engine.add(request("a", prompt, max_tokens=20, ignore_eos=True))
        asked = [False, cut]
        outputs = engine.step(lambda asked=asked: bool(asked) and asked.pop(0))
        assert engine._scheduler.running[0].computed_len == (16 if cut else 60)
        while engine.has_work():
            outputs += engine.step()
        found.append([token for output in outputs for token in output.token_ids])
    assert len(found[0]) == len(found[1]) == 20
    assert sum(a == b for a, b in zip(*found, strict=True)) >= 15  # bfloat16 may turn a token, and all after it differ
