"""Steps without drafts, in an engine that may draft: graphs of their own where a memory folds tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gpu import needs_cuda
from gpu_sessions import logprobs
from tandem import LLM, SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.gpu_runner import GpuRunner
from tandem.engine.sequence import Sequence
from tandem.engine.speculation.draft import Draft
from tandem.engine.speculation.oracle_drafter import OracleDrafter
from tandem.engine.start.loader import load_parts
from tandem.flags.engine_config import EngineConfig

pytestmark = [pytest.mark.gpu, needs_cuda]
PROMPTS = [[7, 8, 9, 7, 8], [40] * 20]
TOKENS = 80


class Sometimes(OracleDrafter):
    """Says something at every second twelve tokens of an answer."""

    def propose(self, sequence: Sequence, most: int) -> Draft | None:
        return super().propose(sequence, most) if sequence.answer_len // 12 % 2 else None


class Counted(GpuRunner):
    """Which steps were replayed without folds. Test-only."""

    def __init__(self, *args, **flags) -> None:
        self.kinds: list[bool] = []
        super().__init__(*args, **flags)

    def _replayed(self, graph, *step):
        self.kinds.append(graph in self._graphs.plain.values())
        return super()._replayed(graph, *step)


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("variant", ["qwen3_next", "qwen3_5_moe_text"])
def test_both_kinds_of_steps_follow_each_other(tiny_models, monkeypatch, variant: str, share: float) -> None:
    """What one of them keeps of a token, the other reads: inputs, and the memory."""
    monkeypatch.setattr("tandem.engine.runners.GpuRunner", Counted)
    path = tiny_models[variant]
    parts = load_parts(
        EngineConfig.from_keywords(
            str(path), device="cuda", kt_gpu_experts_ratio=share, kt_cpuinfer=2, max_total_tokens=512,
            max_running_requests=2, speculative_algorithm="NGRAM", speculative_num_steps=3,
            disable_speculative_governor=True,
        )
    )  # fmt: skip
    assert parts.plan.gpu is not None and parts.plan.gpu.plain_graph_sizes == (1, 2)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=0)
    plain = LLM.from_engine(Engine.from_parts(replace(parts, plan=replace(parts.plan, speculation=None))))
    answers = {
        (str(i), 0): one.token_ids for i, one in enumerate(plain.generate(PROMPTS, params, progress=False), 1)
    }
    drafter = Sometimes(answers, 0.7, parts.model_config.vocab)
    engine = Engine.from_parts(replace(parts, drafter=drafter))
    results = LLM.from_engine(engine).generate(PROMPTS, params, progress=False)
    kinds = engine._runner.kinds
    assert 8 < sum(kinds) < len(kinds) - 8
    texts = [[*prompt, *one.token_ids] for prompt, one in zip(PROMPTS, results, strict=True)]
    got = torch.tensor([[token.logprob for token in one.logprobs] for one in results])
    exact, theirs = (logprobs(path, dtype, texts, TOKENS) for dtype in ("float32", "bfloat16"))
    ours, usual = ((each - exact).abs().median() for each in (got, theirs))
    print(
        f"{variant}: {ours:.2e}, usual {usual:.2e}, drafts {engine.stats().speculation}, {sum(kinds)} of {len(kinds)}"
    )
    assert ours < 2 * usual
