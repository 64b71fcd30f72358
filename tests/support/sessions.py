"""A tiny model with a KV cache that tests step by hand, and Transformers' logits of the same prompts."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM

from tandem import LLM, SamplingParams
from tandem.checkpoint import load_model_config, open_checkpoint
from tandem.engine.state.arrays import allocate
from tandem.experts.usage.expert_usage import ExpertUsage
from tandem.kernels.reference import TorchOps
from tandem.models import ForwardBatch, build
from tandem.planner.plan import Plan
from tandem.planner.ranks.cut import cut
from tandem.spec.shard import ALONE
from tandem.spec.state import page_tokens
from tiny import VOCAB

PAGE_SIZE, PAGES = 4, 12
PROMPT_LENGTHS = (23, 1, 14)


def plan(dtype: str = "float32", fuse: bool = True, context: int = 128) -> Plan:
    return Plan(
        dtype=dtype, expert_format="f32" if dtype == "float32" else "bf16",
        tier="scalar", cpus=(0,), context_length=context, page_size=PAGE_SIZE, num_pages=PAGES,
        max_running_requests=4, max_step_tokens=64, radix_cache=False, fuse_shared_experts=fuse,
    )  # fmt: skip


class Session:
    """A model with a KV cache; sequence s owns every third page, so neighbours in memory are strangers."""

    def __init__(
        self, path, dtype="float32", fuse=True, ops=None, pages=PAGES, counted=False, shard=ALONE, drafts=False,
        **changes,
    ) -> None:
        config = load_model_config(path)
        self.config = cut(replace(config, drafter=config.drafts) if drafts else config, shard)
        self.page = page_tokens(self.config.states, PAGE_SIZE)
        chosen = replace(plan(dtype, fuse, self.page * pages), page_size=self.page, **changes)
        sizes = len(self.config.moe_layers), self.config.moe.experts.count
        self.usage = ExpertUsage(*sizes) if counted else None
        self.model = build(self.config, chosen, open_checkpoint(path), ops or TorchOps(), usage=self.usage)
        self.states = allocate(self.config.state_layout(dtype, self.page), 3 * pages, slots=4).arrays
        for array in (array for arrays in self.states for array in arrays):
            array.fill_(float("nan"))  # a read of a row that was never written must show
        self.lengths, self.pages = [0, 0, 0], pages

    def batch(self, parts: list[tuple[int, list[int]]]) -> ForwardBatch:
        """A batch of (sequence, new tokens) pairs, which are taken to run."""
        starts, positions, slots, lens, tables = [0], [], [], [], []
        for s, tokens in parts:
            pages = [3 * i + s for i in range(self.pages)]
            new = range(self.lengths[s], self.lengths[s] + len(tokens))
            self.lengths[s] = new.stop
            starts.append(starts[-1] + len(tokens))
            positions += new
            slots += [pages[p // self.page] * self.page + p % self.page for p in new]
            lens.append(new.stop)
            tables.append(pages)
        return ForwardBatch(
            input_ids=torch.tensor([t for _, tokens in parts for t in tokens]),
            positions=torch.tensor(positions),
            cache_slots=torch.tensor(slots),
            query_starts=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            block_tables=torch.tensor(tables, dtype=torch.int32),
            logits_rows=torch.arange(starts[-1]),
            slots=torch.tensor([s + 1 for s, _ in parts], dtype=torch.int32),
        )

    def step(self, parts: list[tuple[int, list[int]]]) -> list[torch.Tensor]:
        """Runs (sequence, new tokens) pairs as one batch; logits [new tokens, vocab] of each."""
        batch = self.batch(parts)
        with torch.inference_mode():
            logits = self.model.forward(batch, self.states)
        assert logits.dtype == torch.float32
        starts = batch.query_starts.tolist()
        return [logits[starts[i] : starts[i + 1]] for i in range(len(parts))]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(VOCAB, (n + 6,), generator=generator).tolist() for n in PROMPT_LENGTHS]


# What Transformers 5.17 computes otherwise than 5.23, or not at all; ours follows 5.23.
OUTDATED = {
    "gpt_oss": "has a swiglu_limit of its own", "minimax_m2": "turns all channels", "mistral4": "has no AutoModel",
    "deepseek_v4": "cannot compute in bfloat16", "mimo_v2_flash": "reads rope settings of the hub's config otherwise",
    "bailing_hybrid": "does not know it", "glm5_next_text": "does not know its layers",
    "qwen4_exp_text": "does not know its layers",
}  # fmt: skip


def skip_where_outdated(path, dtype: torch.dtype) -> None:
    kind = json.loads((Path(path) / "config.json").read_text())["model_type"]
    runs = kind == "deepseek_v4" and dtype is torch.float32
    if kind in OUTDATED and not runs and Version(transformers.__version__) < Version("5.23"):
        pytest.skip(f"Transformers {transformers.__version__} {OUTDATED[kind]}")


@cache
def reference(path, dtype=torch.float32) -> list[torch.Tensor]:
    """Transformers' float32 logits of every prompt alone."""
    skip_where_outdated(path, dtype)
    plainest = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **plainest)
    with torch.inference_mode():
        return [model(torch.tensor([p])).logits[0].float() for p in prompts()]


def ours(session: Session) -> list[torch.Tensor]:
    """All phases at once: sequence 0 in chunks of 1, 7, 15 beside the prefill of 1 and 2, then six decode steps."""
    a, b, c = prompts()
    got: list[list[torch.Tensor]] = [[], [], []]
    steps = [[(0, a[:1])], [(0, a[1:8]), (1, b[:1])], [(2, c[:14]), (0, a[8:23])]]
    steps += [[(1, b[1 + i : 2 + i]), (0, a[23 + i : 24 + i]), (2, c[14 + i : 15 + i])] for i in range(6)]
    for parts in steps:
        for (s, _), logits in zip(parts, session.step(parts), strict=True):
            got[s].append(logits)
    return [torch.cat(rows) for rows in got]


def worst(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest difference, relative to the largest logit."""
    return max(float((g - e).abs().max() / e.abs().max()) for g, e in zip(got, expected, strict=True))


def rms(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return float((torch.cat(got) - torch.cat(expected)).pow(2).mean().sqrt())


def median(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return float((torch.cat(got) - torch.cat(expected)).abs().median())


def generated(path, calls: list[list[list[int]]], **flags: object) -> tuple[list[list[int]], int, int]:
    """Greedy answers of calls of prompts, one call after the other; tokens that were found, and preemptions."""
    llm = LLM(str(path), dtype="float32", kt_cpuinfer=2, page_size=4, **flags)
    greedy = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    answers = [each.token_ids for call in calls for each in llm.generate(call, greedy, progress=False)]
    stats = llm.engine.stats()
    return answers, stats.cached_tokens, stats.preemptions
