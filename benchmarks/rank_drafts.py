"""Drafts of several ranks: answers with a draft layer, in turns with answers without, on made-up weights.

    python benchmarks/rank_drafts.py --tp 2 --config glm-4.5-air --acceptance 0.9

Each rank is a process, as in a server. Drafts are made by the draft layer and then exchanged for ones of which the
wished share is accepted: made-up layers draft nothing. Rows: {"bench": "drafts", "tp": …, "tok_s": …, "plain_tok_s": …,
"ratio": …, "right": the accepted share, "per_step": tokens of a step with drafts}. One row a batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import msgspec
import zmq

from tandem.bench.gaps.made_up import MadeUpStart, write_folder
from tandem.bench.rows import keep, machine_name, stamp
from tandem.bench.stored import experts_of, stored_as
from tandem.bench.synthetic import SyntheticCheckpoint
from tandem.checkpoint import load_model_config
from tandem.engine.engine import Engine
from tandem.engine.protocol import GenerateRequest, SamplingSettings
from tandem.engine.ranks.follower import Follower
from tandem.engine.ranks.leader import Leader
from tandem.engine.ranks.messages import StartRank, StepList
from tandem.engine.speculation.oracle_drafter import OracleDrafter
from tandem.engine.start.loader import for_loading, rank_plan, use_one_torch_thread
from tandem.engine.start.packed_start import PackedStart
from tandem.engine.start.parts import EngineParts
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.ranks.meeting import Meeting
from tandem.kernels.this_machine import this_machine
from tandem.kernels.workers import planned_pool
from tandem.machine.machine import Machine
from tandem.planner.choices.requested import as_asked
from tandem.planner.plan import Plan
from tandem.planner.ranks.ranked import ranked
from tandem.planner.resolve import resolve
from tandem.text.tokenizer import Tokenizer

CONTEXT, PROMPT, BEHIND = 4096, 64, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--config", default="glm-4.5-air")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--format", default="INT4", help="of experts, as --kt-method")
    parser.add_argument("--share", type=float, default=1.0, help="of experts on the GPUs")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--algorithm", default="NEXTN")
    parser.add_argument("--acceptance", type=float, default=0.9)
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    use_one_torch_thread()
    if asked.rank:
        follow(asked)
    elif asked.folder is not None:
        lead(asked)
    else:
        start(asked)


def start(asked: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        write_folder(Path(folder), asked.config, asked.layers)
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", folder, "--rank"]
        processes = [subprocess.Popen([*command, str(rank)]) for rank in range(asked.tp)]
        try:
            while all(each.poll() is None for each in processes):
                sleep(0.2)
        finally:
            for each in processes:
                each.kill()
    sys.exit(any(each.wait() > 0 for each in processes))


def config_of(asked: argparse.Namespace) -> EngineConfig:
    on_gpu = {"kt_gpu_experts_ratio": asked.share} if asked.device == "cuda" else {}
    return EngineConfig.from_keywords(
        str(asked.folder), tp=asked.tp, device=asked.device, kt_method=asked.format, context_length=CONTEXT,
        max_running_requests=max(asked.batch or [1]), speculative_algorithm=asked.algorithm, disable_radix_cache=True,
        disable_speculative_governor=True, **on_gpu,
    )  # fmt: skip


@for_loading()
def made_up(config: EngineConfig, plan: Plan, rank: int, meeting: Meeting | None) -> EngineParts:
    """Parts of one rank, as `loader.load_rank` makes them from a checkpoint."""
    model, machine, stored = described(config)
    own, model, machine = ranked(config, model, machine, stored, rank)
    plan = rank_plan(plan, own, machine, rank)
    directory, workers = Path(config.model), planned_pool(plan)
    ops = CpuOps(workers, plan.tier, plan.int8_activations, deterministic=plan.deterministic)
    if meeting is not None and plan.gpu is None:
        from tandem.engine.ranks.joined import cpu_group

        ops.group = cpu_group(meeting)
    checkpoint: Any = SyntheticCheckpoint("bf16", experts_of(config.kt_method or "BF16"))
    with PackedStart(config, directory, workers, None) as packed:  # which keeps nothing
        parts = MadeUpStart(config, plan, model, checkpoint, Tokenizer.load(directory), ops, packed, None, meeting)
        made = parts.cpu_parts() if plan.gpu is None else parts.gpu_parts()
    if meeting is not None:
        meeting.share("loaded", b"-")
    return made


def described(config: EngineConfig) -> tuple[Any, Machine, Any]:
    """The whole model, the machine, and how weights are stored."""
    model = as_asked(config, load_model_config(Path(config.model)))
    return model, this_machine(), stored_as(model, "bf16", experts_of(config.kt_method or "BF16"))


def endpoint_of(asked: argparse.Namespace) -> str:
    return f"ipc://{asked.folder}/engine"


def follow(asked: argparse.Namespace) -> None:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, b"rank %d" % asked.rank)
    socket.connect(endpoint_of(asked))
    socket.send(b"")
    told = msgspec.msgpack.decode(socket.recv(), type=StartRank)
    parts = made_up(told.config, told.plan, asked.rank, Meeting(asked.rank, asked.tp, told.file))
    socket.send(b"")
    follower, steps = Follower(parts), msgspec.msgpack.Decoder(StepList)
    while True:
        follower.step(steps.decode(socket.recv()))


def lead(asked: argparse.Namespace) -> None:
    config, answers = config_of(asked), dict[tuple[str, int], list[int]]()
    plan = resolve(config, *described(config))
    leader = Leader(endpoint_of(asked), asked.tp) if asked.tp > 1 else None
    parts = made_up(config, plan, 0, None if leader is None else leader.start(config, plan))
    if leader is not None:
        leader.loaded()
    drafter = OracleDrafter(answers, asked.acceptance, parts.model_config.vocab)
    engine = Engine.from_parts(replace(parts, leader=leader, drafter=drafter))
    rows = [row | stamp(machine_name(Machine.detect())) for row in measured(asked, engine, answers)]
    if asked.out:
        keep(rows, asked.out)


def measured(asked: argparse.Namespace, engine: Engine, answers: dict[tuple[str, int], list[int]]) -> Iterator[Any]:
    for batch in asked.batch or [1]:
        plain, drafted, right, per_step = list[float](), list[float](), 0.0, 0.0
        for turn in range(asked.repeats + 1):
            answers |= timed(engine, asked, batch, 0)[1]
            before = engine.stats().speculation
            rate, _ = timed(engine, asked, batch, engine.plan.draft_tokens)
            said = engine.stats().speculation
            if turn:  # kernels are loaded in the first one
                plain.append(timed(engine, asked, batch, 0)[0])
                drafted.append(rate)
            draft_tokens = said.draft_tokens - before.draft_tokens
            right = (said.accepted_tokens - before.accepted_tokens) / max(1, draft_tokens)
            steps = max(1, said.draft_steps - before.draft_steps)
            per_step = (said.draft_step_tokens - before.draft_step_tokens) / steps / batch
        row = {
            "bench": "drafts", "tp": asked.tp, "config": asked.config, "layers": asked.layers, "format": asked.format,
            "gpu_share": asked.share, "algorithm": asked.algorithm, "acceptance": asked.acceptance, "batch": batch,
            "tok_s": round(statistics.median(drafted), 2), "plain_tok_s": round(statistics.median(plain), 2),
            "ratio": round(statistics.median(a / b for a, b in zip(drafted, plain, strict=True)), 3),
            "right": round(right, 3), "per_step": round(per_step, 2),
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        yield row


def timed(
    engine: Engine, asked: argparse.Namespace, batch: int, width: int
) -> tuple[float, dict[tuple[str, int], list[int]]]:
    """Tokens per second from when all prompts are computed, with so many drafts a step; and the answers, with tokens
    behind each end."""
    engine._speculation._most = width  # type: ignore[union-attr]
    params = SamplingSettings(temperature=0.0, ignore_eos=True, max_tokens=asked.tokens)
    tokens: list[list[int]] = [[] for _ in range(batch)]
    for i in range(batch):
        prompt = [(7 * i + 3 * at) % 1000 for at in range(PROMPT)]
        engine.add(GenerateRequest(id=str(i), prompt_ids=prompt, sampling=params))
    started, before = perf_counter(), 0
    while engine.has_work():
        for output in engine.step():
            tokens[int(output.id)] += output.token_ids
        if not before and all(tokens):
            started, before = perf_counter(), sum(map(len, tokens))
    rate = (sum(map(len, tokens)) - before) / (perf_counter() - started)
    return rate, {(str(i), 0): [*each, *[7] * BEHIND] for i, each in enumerate(tokens)}


if __name__ == "__main__":
    main()
