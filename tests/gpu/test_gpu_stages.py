"""Layers in stages: on one GPU twice they give the bits of one stage, on two GPUs the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from gpu import needs_cuda
from gpu_sessions import DECODED, PROMPT, ROWS, Session, batch_of, check_answers, on_the_cpu, rms
from staged_gpu import StagedGpu, pinned
from tandem import LLM, SamplingParams
from tandem.engine.stages.pipeline import Pipeline
from tandem.models.batch import ForwardBatch

pytestmark = [pytest.mark.gpu, needs_cuda]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
PLACES = [pytest.param((0, 0), id="one"), pytest.param((0, 1), id="two", marks=needs_two)]
VARIANTS = ["qwen3_moe-gpu", "glm4_moe", "gpt_oss"]


@pytest.mark.parametrize("together", [True, False], ids=["batch8", "batch1"])
@pytest.mark.parametrize("graphs", [(), (1, 8)], ids=["kernels", "graphs"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("devices", PLACES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_stages_give_the_bits_of_one(tiny_models, variant, devices: Sequence[int], share, graphs, together) -> None:
    path = tiny_models[variant]
    one = Session(path, share, graphs).logits(together)
    staged = StagedGpu(path, share, graphs, devices).logits(together)
    exact, theirs = on_the_cpu(path, "float32"), on_the_cpu(path, "bfloat16")
    print(f"{variant} {devices} {share:.0%} {graphs} {together}: {rms(staged, one):.2e} from one stage")
    assert rms(staged, exact) < 1.5 * rms(theirs, exact)
    assert torch.equal(staged, one)


@pytest.mark.parametrize("devices", PLACES)
@pytest.mark.parametrize("variant", ["qwen3_next", "deepseek_v3"])
def test_other_layers_in_stages_give_the_bits_of_one(tiny_models, variant, devices: Sequence[int]) -> None:
    """Slots of delta nets, and latents."""
    path = tiny_models[variant]
    one, staged = Session(path, 0.5, (1, 8)).logits(True), StagedGpu(path, 0.5, (1, 8), devices).logits(True)
    assert torch.equal(staged, one) or rms(staged, one) < 0.2 * rms(
        on_the_cpu(path, "bfloat16"), on_the_cpu(path, "float32")
    )


@pytest.mark.parametrize("devices", PLACES)
def test_each_stage_counts_its_own_experts(tiny_models, devices: Sequence[int]) -> None:
    session = StagedGpu(tiny_models["qwen3_moe-gpu"], 0.5, (8,), devices)
    session.step(list(range(ROWS)), 0, PROMPT)
    session.step([0, 1, 2], PROMPT, 1)
    top_k = session.model.config.moe.router.top_k
    assert session.usage is not None
    tokens = session.usage.read().tokens
    assert tokens.sum(1).eq((ROWS * PROMPT + 3) * top_k).all()
    gpu, cpu, _, _ = session.usage.sides()
    assert torch.equal(gpu + cpu, tokens.sum(1)) and gpu.sum() > 0 and cpu.sum() > 0


@pytest.mark.parametrize("devices", PLACES)
def test_one_thread_answers_the_posts_of_all_stages(tiny_models, devices: Sequence[int]) -> None:
    """Step after step: the count of posts goes from the last stage back to the first."""
    session = StagedGpu(tiny_models["qwen3_moe-gpu"], 0.0, (8,), devices)
    layers = len(session.model.config.moe_layers)
    session.step(list(range(ROWS)), 0, PROMPT)
    for i in range(DECODED):
        session.step(list(range(ROWS)), PROMPT + i, 1)
        assert session.sides.handoffs.used()[0] == layers * (i + 1)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_engine_answers_in_stages_on_one_gpu(monkeypatch, tiny_models, share: float) -> None:
    """As `kt serve --pipeline-parallel-size 2` starts it: planned, warmed, with a prefix that is found again."""
    monkeypatch.setenv("TANDEM_RANKS_SHARE_GPU", "1")
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    prompts = [[7 + i, *range(20, 50)] for i in range(6)] + [[5] * 100]
    flags = {"kt_cpuinfer": 2, "max_total_tokens": 4096, "mem_fraction_static": 0.3, "kt_gpu_experts_ratio": share}
    # One stage streams and moves experts by itself, stages do not: other last bits.
    flags |= {"kt_gpu_prefill_token_threshold": 0, "disable_dynamic_expert_update": True}
    answers = []
    for stages in (1, 2):
        llm = LLM(str(tiny_models["qwen3_moe-gpu"]), device="cuda", pipeline_parallel_size=stages, **flags)
        assert len(llm.engine.plan.gpu.stages) == (stages if stages > 1 else 0)
        # One by one: who is in a step together follows the time that steps take, and last bits follow that.
        answers.append([[llm.generate([each], greedy)[0].token_ids for each in prompts] for _ in range(2)])
        assert all(len(each.token_ids) == 16 for each in llm.generate(prompts, greedy))
        del llm
    assert answers[0] == answers[1]


@pytest.mark.parametrize("devices", PLACES)
@pytest.mark.parametrize("variant", ["qwen3_moe-gpu", "qwen3_next", "deepseek_v3", "gpt_oss"])
def test_pipelined_chunks_give_the_bits_of_one_after_the_other(tiny_models, variant, devices: Sequence[int]) -> None:
    """A prompt in chunks of five tokens, twice: the second time all memory is there, and the host waits for nothing."""
    session, size = StagedGpu(tiny_models[variant], 1.0, (1, 8), devices), 5
    chunks = [pinned(batch_of([3], first, min(size, PROMPT - first))) for first in range(0, PROMPT, size)]
    expected = torch.cat([session.step([3], first, min(size, PROMPT - first)) for first in range(0, PROMPT, size)], 1)
    decoded = session.step([3], PROMPT, 1)
    for _ in range(2):
        logits = session.runner.prompt_logits(chunks)
        assert torch.equal(logits.logits.cpu(), expected[0])
        assert logits.best[:, 0].tolist() == logits.logits.argmax(1).tolist()
        assert torch.equal(session.step([3], PROMPT, 1), decoded)
    if variant == "deepseek_v3":
        return  # a step's first layer asks the GPU how long sequences are
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.inference_mode():
            for chunk in chunks:
                session.runner.pipeline.give(chunk)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for device in set(devices):
        torch.cuda.synchronize(device)
    assert torch.equal(session.step([3], PROMPT, 1), decoded)


@pytest.mark.parametrize("devices", PLACES)
def test_the_engine_pipelines_long_prompts(monkeypatch, tiny_models, devices: Sequence[int]) -> None:
    """Prompts one after the other, so that each is alone; twice, with prefixes that are found."""
    if len(set(devices)) == 1:
        monkeypatch.setenv("TANDEM_RANKS_SHARE_GPU", "1")
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompts = [[7 + i % 90 for i in range(first, first + count)] for first, count in ((0, 100), (5, 8), (9, 110))]
    flags = {
        "kt_cpuinfer": 2, "max_total_tokens": 4096, "mem_fraction_static": 0.3, "kt_gpu_experts_ratio": 1.0,
        "chunked_prefill_size": 8, "max_running_requests": 4,
    }  # fmt: skip
    answers, given, give = [], list[int](), Pipeline.give

    def noted(self: Pipeline, batch: ForwardBatch) -> torch.Tensor:
        given.append(len(batch.input_ids))
        return give(self, batch)

    monkeypatch.setattr(Pipeline, "give", noted)
    for stages in (1, 2):
        llm = LLM(str(tiny_models["qwen3_moe-gpu"]), device="cuda", pipeline_parallel_size=stages, **flags)
        assert llm.engine.plan.gpu.pipelined_chunks == (8 if stages > 1 else 1)
        answers.append([[llm.generate([each], greedy)[0].token_ids for each in prompts] for _ in range(2)])
        del llm
    assert answers[0] == answers[1] and given.count(8) >= 100 // 8 + 110 // 8


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_experts_are_streamed_to_both_stages_for_long_prompts(monkeypatch, tiny_models, share: float) -> None:
    """Where that is asked for; short prompts beside them have their experts computed on the CPU."""
    monkeypatch.setenv("TANDEM_RANKS_SHARE_GPU", "1")
    path = tiny_models["qwen3_moe-gpu"]
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
    llm = LLM(
        str(path), device="cuda", pipeline_parallel_size=2, kt_cpuinfer=2, max_total_tokens=4096,
        mem_fraction_static=0.3, kt_gpu_experts_ratio=share, kt_gpu_prefill_token_threshold=64,
    )  # fmt: skip
    streams = llm.engine.gpu_runner._start._streams
    assert len(streams) == 2
    begun: list[tuple[int, int]] = []
    for number, (_, stream) in enumerate(streams):
        begin = stream.begin

        def noted(rows, shared=False, begin=begin, number=number, stream=stream) -> None:
            begin(rows, shared=shared)
            begun.append((number, len(stream.counts)))

        monkeypatch.setattr(stream, "begin", noted)
    prompts = [[7 + i % 90 for i in range(first, first + 110)] for first in range(2)]
    check_answers(path, prompts, llm.generate(prompts, greedy))
    layers = len(llm.engine.model_config.moe_layers)
    assert any(count for number, count in begun if number == 0) and any(count for number, count in begun if number == 1)
    assert all(count < layers for _, count in begun)
