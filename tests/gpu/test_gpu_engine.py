"""Placement changes where experts are computed, never what is computed.

Teacher-forced logits of a small random model, on a GPU: all experts in CPU memory, 25 %, 50 %, all on the GPU, through
CUDA graphs and kernel by kernel, one row at a time and eight together. The reference is the same model in float32;
the tolerance is the error that bfloat16 has on the CPU (`CpuOps`), half as much again, since rounding points differ.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from fake_model import request
from fake_windows import scored, windows_of
from gpu import needs_cuda
from gpu_sessions import DECODED, PROMPT, ROWS, Session, batch_of, by_row, on_the_cpu, rms
from tandem.engine.engine import Engine
from tandem.engine.start.loader import load_parts
from tandem.errors import EngineError
from tandem.flags.engine_config import EngineConfig
from tandem.models import ForwardBatch

pytestmark = [pytest.mark.gpu, needs_cuda]
SHARES = (0.0, 0.25, 0.5, 1.0)


@pytest.mark.parametrize("together", [True, False], ids=["batch8", "batch1"])
@pytest.mark.parametrize("graphs", [(), (1, 8)], ids=["kernels", "graphs"])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("variant", ["qwen3_moe-gpu", "glm4_moe", "gpt_oss"])
def test_placement_does_not_change_the_logits(tiny_models, variant, share, graphs, together) -> None:
    path = tiny_models[variant]
    exact, theirs = on_the_cpu(path, "float32"), on_the_cpu(path, "bfloat16")
    ours = Session(path, share, graphs).logits(together)
    allowed = 1.5 * rms(theirs, exact)
    print(
        f"{variant} {share:.0%} graphs={graphs} together={together}: {rms(ours, exact):.2e} of {allowed:.2e}"
    )
    assert rms(ours, exact) < allowed


@pytest.mark.parametrize("together", [True, False], ids=["batch8", "batch1"])
@pytest.mark.parametrize("graphs", [(), (1, 8)], ids=["kernels", "graphs"])
@pytest.mark.parametrize("share", [0.25, 0.5])
@pytest.mark.parametrize("variant", ["qwen3_moe-gpu", "glm4_moe", "gpt_oss"])
def test_experts_that_move_at_every_step_do_not_change_the_logits(
    tiny_models, variant, share, graphs, together
) -> None:
    path = tiny_models[variant]
    exact, theirs = on_the_cpu(path, "float32"), on_the_cpu(path, "bfloat16")
    session = Session(path, share, graphs, moving=True)
    before = session.side.placement.gpu_experts
    ours = session.logits(together)
    allowed = 1.5 * rms(theirs, exact)
    print(
        f"{variant} {share:.0%} graphs={graphs}: {rms(ours, exact):.2e} of {allowed:.2e}, {session.usage.swaps}"
    )
    assert rms(ours, exact) < allowed
    both_sides = int((before.any(1) & ~before.all(1)).sum())
    steps = (1 + DECODED) * (1 if together else ROWS)
    # Parts of an exchange are put off while a step has no time for them, so it takes some steps.
    assert session.usage.swaps >= both_sides * max(1, steps // 16)
    assert torch.equal(session.usage.gpu_experts.sum(1), before.sum(1))
    for layer, experts in session.side.store.layers.items():
        if experts.sides is not None:
            slots = experts.sides.gpu.table.cpu()[: before.shape[1]]
            assert torch.equal(slots >= 0, session.usage.gpu_experts[layer])


@pytest.mark.parametrize("variant", ["qwen3_moe-gpu", "glm4_moe", "gpt_oss"])
def test_rows_decode_beside_a_prompt(tiny_models, variant) -> None:
    """Three sequences with one row each, a fourth with many, in one step."""
    path = tiny_models[variant]
    session = Session(path, 0.5, ())
    session.step(list(range(ROWS)), 0, PROMPT)
    one, many = batch_of([0, 1, 2], PROMPT, 1), batch_of([3], PROMPT, DECODED)
    names = ("input_ids", "positions", "cache_slots", "seq_lens", "block_tables", "slots")
    parts = {name: torch.cat((getattr(one, name), getattr(many, name))) for name in names}
    starts = torch.cat((one.query_starts, many.query_starts[1:] + 3))
    batch = ForwardBatch(**parts, query_starts=starts, logits_rows=torch.arange(3 + DECODED), single_rows=3)
    with torch.inference_mode():
        ours = session.runner.logits(batch).logits.cpu()

    exact, theirs = on_the_cpu(path, "float32"), on_the_cpu(path, "bfloat16")
    wanted = torch.cat((exact[:3, PROMPT], exact[3, PROMPT:]))
    # So few rows say little together: in bfloat16 some choose another expert, and are far off. The middle one of the
    # decoding rows and that of the prompt's are like the middle one on the CPU; a row at a wrong place would be off by
    # the logits' own size.
    usual = by_row(theirs, exact).median()
    got = by_row(ours, wanted)
    print(f"{variant}: {got.tolist()}; usual {usual:.2e}, logits {wanted.pow(2).mean().sqrt():.2e}")
    assert got[:3].median() < 2 * usual and got[3:].median() < 2 * usual
    assert got.max() < 0.5 * wanted.pow(2).mean().sqrt()


def test_a_graph_fills_up_with_copies(tiny_models) -> None:
    """Three rows in a graph of eight give the bits that they give alone in it."""
    session = Session(tiny_models["qwen3_moe-gpu"], 0.5, (8,))
    session.step(list(range(ROWS)), 0, PROMPT)
    whole = session.step(list(range(ROWS)), PROMPT, 1)
    assert torch.equal(session.step([0, 1, 2], PROMPT, 1), whole[:3])


@pytest.mark.parametrize(
    "variant", ["qwen3_moe-gpu", "glm4_moe"]
)  # glm4_moe has groups and fused shared experts
def test_graphs_count_the_rows_that_are_real(tiny_models, variant) -> None:
    """Captures and warm-ups count nothing; of a graph of eight with three sequences, three rows count."""
    session = Session(tiny_models[variant], 0.5, (8,))
    assert session.usage.read().tokens.eq(0).all()
    top_k = session.model.config.moe.router.top_k
    session.step(list(range(ROWS)), 0, PROMPT)
    prompt = session.usage.read().tokens
    assert prompt.sum(1).eq(ROWS * PROMPT * top_k).all()
    session.step([0, 1, 2], PROMPT, 1)
    totals = session.usage.read()
    step, chosen = totals.tokens - prompt, session.usage.chosen(3).long()
    for layer in range(len(step)):
        expected = torch.bincount(chosen[:, layer].flatten(), minlength=step.shape[1])
        assert torch.equal(step[layer], expected)
    assert torch.equal(totals.reads, (prompt > 0).long() + (step > 0))
    gpu, cpu, gpu_bytes, cpu_bytes = session.usage.sides()
    assert torch.equal(gpu + cpu, totals.tokens.sum(1)) and gpu.sum() > 0 and cpu.sum() > 0
    assert gpu_bytes.sum() > 0 and cpu_bytes.sum() > 0


@pytest.mark.parametrize("fmt", ["bf16", "int4"])
def test_graphs_keep_the_chosen_ids_where_no_expert_is_on_the_cpu(tiny_models, fmt: str) -> None:
    """Then the copy that keeps them stands right before a kernel that starts early."""
    sessions = [Session(tiny_models["qwen3_moe-gpu"], 1.0, graphs, fmt=fmt) for graphs in ((), (8,))]
    for _ in range(3):
        kept = []
        for session in sessions:
            session.step(list(range(ROWS)), 0, PROMPT)
            logits = session.step(list(range(ROWS)), PROMPT, 1)
            kept.append((logits, session.usage.chosen(ROWS)))
        assert torch.equal(kept[0][0], kept[1][0]) and torch.equal(kept[0][1], kept[1][1])
        assert kept[1][1].min() >= 0


@pytest.mark.parametrize("moving", [False, True], ids=["static", "moving"])
@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("variant", ["qwen3_moe", "glm4_moe-plain"])  # every layer has experts
def test_foresight_changes_no_bit(tiny_models, variant, share, moving) -> None:
    """In graphs of few rows two of three layers are foreseen, in others none."""
    path, found = tiny_models[variant], []
    for foresight in (False, True):
        session = Session(path, share, (1, 4, 8), moving=moving and share > 0, foresight=foresight)
        session.step(list(range(ROWS)), 0, PROMPT)
        whole = session.decoded(list(range(ROWS)))
        assert session.side.handoff.hints() == (0, 0, 0)
        few = [session.step(rows, PROMPT + i, 1) for rows in ([0, 1, 2], [5]) for i in range(DECODED)]
        found.append(torch.cat([*whole, *few]))
        hints = session.side.handoff.hints()
        print(f"{variant} {share:.0%} moving={moving}: {hints}")
        if foresight:
            largest = max(experts.expert_bytes for experts in session.side.store.layers.values())
            assert 0 < hints.hits <= hints.hinted and hints.nbytes <= hints.hinted * largest
        else:
            assert hints == (0, 0, 0)
    assert torch.equal(*found)


def test_a_cpu_that_never_answers_fails_the_step_and_the_next_one_works(tiny_models, monkeypatch) -> None:
    session = Session(tiny_models["qwen3_moe-gpu"], 0.5, (8,), patience=1.0)
    session.step(list(range(ROWS)), 0, PROMPT)
    good = session.step(list(range(ROWS)), PROMPT, 1)
    handoff = session.side.handoff
    begin, finish, asked = handoff.begin, handoff.finish, list[int]()

    def hung() -> None:
        torch.cuda.synchronize()  # ends although nobody answers: the kernels lose patience
        begin(*asked)
        finish()

    monkeypatch.setattr(handoff, "begin", asked.append)
    monkeypatch.setattr(handoff, "finish", hung)
    with pytest.raises(EngineError, match="given up"):
        session.step(list(range(ROWS)), PROMPT, 1)
    monkeypatch.undo()
    assert torch.equal(session.step(list(range(ROWS)), PROMPT, 1), good)


def test_patience_that_ends_in_the_last_layer_fails_that_step_and_the_next_one_works(
    tiny_models, monkeypatch
) -> None:
    session = Session(tiny_models["qwen3_moe-gpu"], 0.5, (8,), patience=1.0)
    session.step(list(range(ROWS)), 0, PROMPT)
    good = session.step(list(range(ROWS)), PROMPT, 1)
    handoff = session.side.handoff
    begin, finish = handoff.begin, handoff.finish

    def late() -> None:
        finish()
        torch.cuda.synchronize()  # the last `collect` loses patience
        begin(1)
        finish()  # which the CPU does not notice: the post is there

    monkeypatch.setattr(handoff, "begin", lambda posts: begin(posts - 1))
    monkeypatch.setattr(handoff, "finish", late)
    with pytest.raises(EngineError, match="given up"):
        session.step(list(range(ROWS)), PROMPT, 1)
    monkeypatch.undo()
    assert torch.equal(session.step(list(range(ROWS)), PROMPT, 1), good)


def test_an_exception_of_a_layer_fails_the_step_and_the_next_one_works(tiny_models, monkeypatch) -> None:
    session = Session(tiny_models["qwen3_moe-gpu"], 0.5, (8,), patience=5.0)
    session.step(list(range(ROWS)), 0, PROMPT)
    good = session.step(list(range(ROWS)), PROMPT, 1)
    handoff = session.side.handoff
    begin = handoff.begin
    monkeypatch.setattr(
        handoff, "begin", lambda posts: begin(posts + 1)
    )  # waits for a post that does not come
    with pytest.raises(EngineError, match="no experts"):
        session.step(list(range(ROWS)), PROMPT, 1)
    monkeypatch.undo()
    assert torch.equal(session.step(list(range(ROWS)), PROMPT, 1), good)


def test_an_interrupt_between_a_graph_and_its_experts_leaves_the_next_step_alone(tiny_models, monkeypatch) -> None:
    """Its patience is longer than the test: nobody waits for it to end."""
    session = Session(tiny_models["qwen3_moe-gpu"], 0.5, (8,), patience=200.0)
    session.step(list(range(ROWS)), 0, PROMPT)
    good = session.step(list(range(ROWS)), PROMPT, 1)

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(session.runner, "_move_experts", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.step(list(range(ROWS)), PROMPT, 1)
    monkeypatch.undo()
    assert torch.equal(session.step(list(range(ROWS)), PROMPT, 1), good)


# -- layers that see a window keep their window alone: the same answers, whatever the pages that went hold ---


def prompt_of(length: int, first: int) -> list[int]:
    return [(first + 7 * i) % 60 + 2 for i in range(length)]


def near(one: list[dict], other: list[dict]) -> None:
    """Which rows share a step depends on time, and the last bits on that: tokens are the same until two are about as
    likely. What a page of NaN gave would be none."""
    for mine, theirs in zip(one, other, strict=True):
        assert mine.keys() == theirs.keys()
        for name, tokens in mine.items():
            both = [[each for _, some in steps for each in some] for steps in (tokens, theirs[name])]
            assert len(both[0]) == len(both[1]) and all(math.isfinite(each.logprob) for each in both[1])
            pairs = zip(*both, strict=True)
            same = list(itertools.takewhile(lambda pair: pair[0].token_id == pair[1].token_id, pairs))
            assert all(abs(a.logprob - b.logprob) < 0.05 for a, b in same)
            if len(same) < len(both[0]):
                (_, best), (_, second) = both[0][len(same)].top[:2]
                assert best - second < 0.1


@pytest.mark.parametrize(
    "flags",
    [{}, {"speculative_algorithm": "NGRAM"}, {"enable_deterministic_inference": True}],
    ids=["plain", "draft_tokens", "bits"],
)
@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize(
    "variant", ["gpt_oss", "mixtral-window", "qwen2_moe-window", "mimo_v2_flash", "laguna", "gemma4_text"]
)
def test_windows_answer_alike_with_pages_of_nan(tiny_models, variant: str, share: float, flags: dict) -> None:
    """In graphs and kernel by kernel; a second turn takes up what the first one's window left. To the last bit, where
    rows beside a row do not matter."""
    parts = load_parts(
        EngineConfig.from_keywords(
            str(tiny_models[variant]), device="cuda", kt_gpu_experts_ratio=share, kt_cpuinfer=2, max_total_tokens=1024,
            page_size=8, max_running_requests=2, chunked_prefill_size=48, **flags,
        )
    )  # fmt: skip
    plan = parts.plan
    layout = parts.model_config.state_layout(plan.dtype, plan.page_size, plan.draft_tokens)
    count = layout.window_pages(plan.max_running_requests, plan.max_step_tokens)
    assert plan.num_window_pages == count < plan.num_pages
    first = [request(str(i), prompt_of(70 + 25 * i, i), max_tokens=30, logprobs=2) for i in range(2)]
    turns = [request("t", [*prompt_of(95, 1), *prompt_of(20, 9)], max_tokens=10, logprobs=2)]
    found = []
    for pages in (0, count):
        engine = Engine.from_parts(replace(parts, plan=replace(parts.plan, num_window_pages=pages)))
        found.append([scored(engine, some) for some in (first, turns)])
    near(*found)
    assert found[0] == found[1] or not plan.deterministic
    engine._kv.flush()
    assert windows_of(engine).available == count
