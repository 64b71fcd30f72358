"""A tiny model in the GPU engine's own runner: eight teacher-forced sequences, a share of the experts on the GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plans import gpu_plan
from tandem import LLM, SamplingParams, _core
from tandem.architectures.load import load_config
from tandem.checkpoint import open_checkpoint
from tandem.engine.engine import Engine
from tandem.engine.gpu_runner import GpuRunner
from tandem.engine.llm import Generation
from tandem.engine.ranks.joined import gpu_group
from tandem.engine.state.arrays import allocate
from tandem.experts.live.copies import CudaCopies, hold_all
from tandem.experts.live.exchange import LiveExchange
from tandem.experts.live.live_experts import LiveExperts
from tandem.experts.live.policy import LivePolicy, PolicySettings
from tandem.experts.live.virtual import Exchange
from tandem.experts.residency import Residency
from tandem.experts.usage.expert_usage import ExpertUsage
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.ranks.meeting import Meeting
from tandem.models import ForwardBatch, build
from tandem.planner.plan import Plan
from tandem.planner.ranks.cut import cut
from tandem.spec.shard import RankShard
from tiny import VOCAB

if TYPE_CHECKING:
    from tandem.engine.start.gpu_side import GpuSide

PAGE, PAGES, ROWS, PROMPT, DECODED = 16, 4, 8, 21, 9

# Names that tests of prompts have for parts of an engine and its runner.
Engine._aside = property(lambda engine: engine._overlap)
for _name, _kind in (("_prompts", "prefill"), ("_passes", "background"), ("_splits", "shared")):
    setattr(GpuRunner, _name, property(lambda runner, kind=_kind: getattr(runner._graphs, kind)))


def plan(
    share: float,
    graphs: tuple[int, ...],
    experts: int,
    patience: float = 20.0,
    live: bool = False,
    foresight: bool = True,
) -> Plan:
    return Plan(
        dtype="bfloat16", expert_format="bf16", tier=_core.supported_tiers()[-1], cpus=(-1, -1), context_length=64,
        page_size=PAGE, num_pages=ROWS * PAGES, max_running_requests=ROWS, max_step_tokens=256, radix_cache=False,
        fuse_shared_experts=True,
        gpu=gpu_plan(
            round(share * experts), graphs, placement="random", patience_seconds=patience, live=live,
            foresight=foresight,
        ),
    )  # fmt: skip


class Restless(LivePolicy):
    """Moves an expert of every layer at every decision, the next one of each side."""

    turn = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.under_way: set[int] = set()

    @property
    def interval_steps(self) -> int:
        return 1  # resting, too

    def next_exchanges(self) -> list[Exchange]:
        self.turn += 1
        found = []
        for layer, slots in enumerate(self.slot_of):
            there, elsewhere = (slots >= 0).nonzero().flatten(), (slots < 0).nonzero().flatten()
            if layer in self.under_way or not len(there) or not len(elsewhere):
                continue
            leaving, coming = there[self.turn % len(there)], elsewhere[self.turn % len(elsewhere)]
            found.append(Exchange(layer, int(slots[leaving]), int(leaving), int(coming)))
            self.under_way.add(layer)
        return found

    def done(self, *exchanges: Exchange) -> None:
        super().done(*exchanges)
        self.under_way.difference_update(exchange.layer for exchange in exchanges)


def restless(side: GpuSide, usage: ExpertUsage) -> LiveExperts:
    layers = [experts.sides for _, experts in sorted(side.store.layers.items())]
    slot_of = torch.stack([side.placement.slots(layer) for layer in range(len(layers))])
    policy = Restless(Residency(slot_of), 1.0, 1.0, PolicySettings(interval_steps=1))
    copies = CudaCopies(side.ops.device)
    usage.copy = copies.in_order
    hold_all([layer.cpu for layer in layers if layer], copies)
    exchange = LiveExchange(
        layers, side.store.tables, copies, 1 << 30, between_answers=side.handoff.between_answers,
        tail_seconds=1.0,  # whatever else the machine does: a batch ends after its step
    )  # fmt: skip
    return LiveExperts(policy, exchange, usage)


def gpu_of(meeting: Meeting | None) -> str:
    """A rank's own, as far as there are so many; "": any."""
    if meeting is None:
        return ""
    number = meeting.rank % torch.cuda.device_count()
    return f"GPU-{torch.cuda.get_device_properties(number).uuid}"


class Session:
    """Eight sequences of a prompt and teacher-forced tokens, on the GPU side that `share` and `graphs` say."""

    def __init__(
        self,
        path: Path,
        share: float,
        graphs: tuple[int, ...],
        patience: float = 20.0,
        moving: bool = False,
        fmt: str = "bf16",
        foresight: bool = True,
        deferred: int = 0,
        prompts: tuple[int, ...] = (),
        reserved_sms: int = 0,
        meeting: Meeting | None = None,
    ) -> None:
        """meeting: with other ranks, each of which has a part of the model."""
        from tandem.engine.graphs.inputs import GraphPlan
        from tandem.engine.start.gpu_side import begin_step, gpu_side, order_posts
        from tandem.engine.step.batch import StepShape

        config = load_config(path)
        config = config if meeting is None else cut(config, RankShard(meeting.rank, meeting.ranks))
        experts = config.routed_experts
        made = replace(plan(share, graphs, experts, patience, moving, foresight), expert_format=fmt)
        made = replace(made, gpu=replace(made.gpu, deferred=deferred, uuid=gpu_of(meeting)))
        self.pool = _core.WorkerPool([-1, -1])
        self.side = gpu_side(made, config, CpuOps(self.pool, made.tier))
        self.group = None if meeting is None else gpu_group(meeting, self.side.ops.device)
        self.side.ops.group = self.group
        self.usage = ExpertUsage(
            len(config.moe_layers), config.moe.router.num_experts,
            device=self.side.ops.device, padded=True, gpu_experts=self.side.placement.gpu_experts,
            chosen=(256, config.moe.router.top_k),
        )  # fmt: skip
        self.model = build(
            config, made, open_checkpoint(path), self.side.ops, None, self.side.store, usage=self.usage
        )
        order_posts(made, self.side)
        layout = config.state_layout("bfloat16", PAGE)
        kept = allocate(layout, ROWS * PAGES, torch.device("cuda"), ROWS + 2)
        live = restless(self.side, self.usage) if moving else None
        self.slots = kept.slots  # of sequence s: s + 1; the last is spare
        self.runner = GpuRunner(
            self.model, kept.arrays, self.side.handoff,
            GraphPlan(graphs, PAGES, prompts=prompts, reserved_sms=reserved_sms, one_stream=meeting is not None),
            StepShape(PAGE, 256), usage=self.usage, live=live, begin_step=begin_step(self.side, None, live),
        )  # fmt: skip

    def step(self, rows: list[int], first: int, count: int) -> Tensor:
        """Tokens first ... first + count - 1 of these sequences: logits [rows, count, vocab]."""
        torch.cuda.synchronize()  # copies of an exchange have arrived: it ends after this step
        with torch.inference_mode():
            logits = self.runner.logits(batch_of(rows, first, count))
        assert logits.best[:, 0].tolist() == logits.logits.argmax(1).tolist()
        return logits.logits.cpu().clone().view(len(rows), count, -1)

    def logits(self, together: bool) -> Tensor:
        """[ROWS, PROMPT + DECODED, vocab]: prompts, then decode steps of all rows, or of one after the other."""
        groups = [list(range(ROWS))] if together else [[row] for row in range(ROWS)]
        return torch.cat(
            [torch.cat([self.step(group, 0, PROMPT), *self.decoded(group)], 1) for group in groups]
        )

    def decoded(self, group: list[int]) -> list[Tensor]:
        return [self.step(group, PROMPT + i, 1) for i in range(DECODED)]


def tokens() -> Tensor:
    return torch.randint(VOCAB, (ROWS, PROMPT + DECODED), generator=torch.Generator().manual_seed(3))


def batch_of(rows: list[int], first: int, count: int) -> ForwardBatch:
    positions = torch.arange(first, first + count)
    pages = torch.tensor([[page * ROWS + row for page in range(PAGES)] for row in rows], dtype=torch.int32)
    slots = pages[:, positions // PAGE].long() * PAGE + positions % PAGE
    return ForwardBatch(
        input_ids=tokens()[rows, first : first + count].flatten(), positions=positions.repeat(len(rows)),
        cache_slots=slots.flatten(), query_starts=torch.arange(len(rows) + 1, dtype=torch.int32) * count,
        seq_lens=torch.full((len(rows),), first + count, dtype=torch.int32), block_tables=pages,
        logits_rows=torch.arange(len(rows) * count), slots=torch.tensor(rows, dtype=torch.int32) + 1,
    )  # fmt: skip


@cache
def on_the_cpu(path: Path, dtype: str) -> Tensor:
    config = load_config(path)
    fmt = "f32" if dtype == "float32" else "bf16"
    made = replace(plan(0.0, (), 0), dtype=dtype, expert_format=fmt, gpu=None)
    model = build(config, made, open_checkpoint(path), CpuOps(_core.WorkerPool([-1, -1]), made.tier))
    states = allocate(config.state_layout(dtype, PAGE), ROWS * PAGES, slots=ROWS + 1).arrays
    with torch.inference_mode():
        logits = model.forward(batch_of(list(range(ROWS)), 0, PROMPT + DECODED), states)
    return logits.view(ROWS, PROMPT + DECODED, -1)


def rms(a: Tensor, b: Tensor) -> float:
    return float((a - b).pow(2).mean().sqrt())


def by_row(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).pow(2).mean(-1).sqrt()


def logprobs(path: Path, dtype: str, texts: list[list[int]], answered: int) -> Tensor:
    """Log-probabilities of the last `answered` tokens of each text, all computed at once on the CPU."""
    llm = LLM(str(path), device="cpu", dtype=dtype, kt_cpuinfer=2, max_total_tokens=1024)
    scored = llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=0))
    return torch.tensor([[token.logprob for token in one.prompt_logprobs[-answered:]] for one in scored])


def check_answers(path: Path, prompts: list[list[int]], answers: list[Generation]) -> None:
    """Of equal length. What the engine says of its tokens is what float32 says of them, as nearly as bfloat16 on the
    CPU does."""
    texts = [[*prompt, *answer.token_ids] for prompt, answer in zip(prompts, answers, strict=True)]
    got = torch.tensor([[token.logprob for token in answer.logprobs] for answer in answers])
    exact, theirs = (logprobs(path, dtype, texts, got.shape[1]) for dtype in ("float32", "bfloat16"))
    assert rms(got, exact) < 2 * rms(theirs, exact)
