"""A tiny deterministic model for engine tests: fast, and sensitive to every mistake in paging.

It stores (token, position) in the KV pages it is told to, reads the whole prefix back through the block tables, checks
that positions are 0, 1, 2 …, and derives the logits from a hash of the tokens. Stale, shared by mistake or misplaced
pages change the answer or fail at once.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from tandem.engine.engine import Engine
from tandem.engine.protocol import GenerateRequest, SamplingSettings, TokenOutput
from tandem.engine.sequence import Status
from tandem.engine.speculation.draft import Drafter
from tandem.engine.speculation.oracle_drafter import OracleDrafter
from tandem.engine.start.parts import EngineParts
from tandem.mechanisms.dense.shape import Dense
from tandem.mechanisms.grouped_query.shape import Gqa
from tandem.planner.choices.speculation import SpeculationPlan
from tandem.planner.plan import Plan
from tandem.spec.layers import pre_norm
from tandem.spec.model_config import ModelConfig
from tandem.spec.norm import Norm
from tandem.spec.rope import Rope

VOCAB = 64
EOS = 1


class FakeModel:
    def __init__(self) -> None:
        self.rows_run = 0
        self.fail_on: set[int] = set()  # a prompt's first token: raises when such a sequence is in the batch
        self.nan_on: set[int] = set()  # likewise, but its logits are NaN

    def forward(self, batch, kv) -> torch.Tensor:
        ids, positions = batch.input_ids.numpy(), batch.positions.numpy()
        self.rows_run += len(ids)
        for k_pages, v_pages in kv:
            k_pages.view(-1)[batch.cache_slots] = torch.from_numpy(ids).to(k_pages.dtype)
            v_pages.view(-1)[batch.cache_slots] = torch.from_numpy(positions).to(v_pages.dtype)
        rows = [self._row(batch, kv[-1], int(row)) for row in batch.logits_rows]
        return torch.from_numpy(np.stack(rows)) if rows else torch.zeros(0, VOCAB)

    def _row(self, batch, layer, row: int) -> np.ndarray:
        s = int(np.searchsorted(batch.query_starts.numpy(), row, side="right")) - 1
        length = int(batch.positions[row]) + 1
        assert length <= int(batch.seq_lens[s])
        page_size = layer[0].shape[1]
        pages = batch.block_tables[s, : -(-length // page_size)].long()
        tokens = layer[0][pages].flatten()[:length].numpy().astype(np.int64)
        stored = layer[1][pages].flatten()[:length].numpy().astype(np.int64)
        assert (stored == np.arange(length)).all(), "a page holds other positions than it should"
        if tokens[0] in self.fail_on:
            raise RuntimeError("the fake model was told to fail")
        if tokens[0] in self.nan_on:
            return np.full(VOCAB, np.nan, dtype=np.float32)
        return fake_logits(tokens.tolist())


def fake_logits(tokens: list[int]) -> np.ndarray:
    """float32 [VOCAB] for the token after `tokens`."""
    state = 7
    for token in tokens:
        state = (state * 1_000_003 + token + 1) % 2_147_483_647
    return (np.random.default_rng(state).standard_normal(VOCAB) * 2.0).astype(np.float32)


class FakeTokenizer:
    """Token i is the character chr(64 + i); `eos_ids` are not text."""

    eos_ids = (EOS,)
    bos_id = None
    guard = own_markers = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(char) - 64 for char in text]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(64 + i) for i in ids if not (skip_special_tokens and i == EOS))


def fake_plan(**changes) -> Plan:
    plan = Plan(
        dtype="float32", expert_format="f32", tier="scalar", cpus=(0,),
        context_length=256, page_size=4, num_pages=64, max_running_requests=8, max_step_tokens=16,
        radix_cache=True, fuse_shared_experts=False,
    )  # fmt: skip
    return replace(plan, **changes)


def fake_config() -> ModelConfig:
    attention, norm = Gqa(heads=1, kv_heads=1, head_dim=1, rope=Rope(1.0, 0)), Norm(1e-6)
    return ModelConfig(
        model_type="fake", hidden=1, vocab=VOCAB, layers=(pre_norm(attention, Dense(1), norm),) * 2, norm=norm,
        tied_embeddings=False, max_positions=4096, eos_ids=(EOS,),
    )  # fmt: skip


def fake_engine(model: FakeModel | None = None, *, drafter: Drafter | None = None, **plan) -> Engine:
    made = fake_plan(**plan)
    return Engine.from_parts(
        EngineParts(made, fake_config(), model or FakeModel(), FakeTokenizer(), drafter=drafter)
    )


def foretold_engine(
    answers: dict[tuple[str, int], list[int]], acceptance: float, *, governed: bool = False, most: int = 4, **plan
) -> Engine:
    """One whose drafter knows the answers, and says so much of them right."""
    wanted = SpeculationPlan("made up", most, governed)
    return fake_engine(drafter=OracleDrafter(answers, acceptance, VOCAB), speculation=wanted, **plan)


def check_pages(engine: Engine) -> None:
    """No page leaked, none owned twice: counts of users equal what the running sequences hold."""
    kv, running = engine._kv, engine._scheduler.running
    users = [0] * kv.num_pages
    for sequence in running:
        assert len(set(sequence.pages)) == len(sequence.pages)
        for page in sequence.pages:
            users[page] += 1
    assert users == kv._users
    free, idle = set(kv._free), set(kv._idle)
    assert len(free) == len(kv._free) and not free & idle
    assert {page for page, count in enumerate(users) if count == 0} == free | idle
    assert idle <= set(kv._tree._node_of_page) if kv._tree else not idle
    for sequence in engine._scheduler.waiting:
        assert sequence.num_pages == 0 and sequence.status in (Status.WAITING, Status.PREEMPTED)


def request(name: str, prompt: list[int], **sampling) -> GenerateRequest:
    sampling = {"temperature": 0.0, "max_tokens": 8} | sampling
    return GenerateRequest(id=name, prompt_ids=prompt, sampling=SamplingSettings(**sampling))


def run(
    engine: Engine, *requests: GenerateRequest, most_steps: int = 10_000
) -> dict[tuple[str, int], list[TokenOutput]]:
    """All outputs by (request id, answer index)."""
    for one in requests:
        engine.add(one)
    outputs: dict[tuple[str, int], list[TokenOutput]] = {}
    for _ in range(most_steps):
        if not engine.has_work():
            return outputs
        for output in engine.step():
            outputs.setdefault((output.id, output.index), []).append(output)
    raise AssertionError("the engine did not finish")


def token_ids(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def text(outputs: list[TokenOutput]) -> str:
    return "".join(output.text for output in outputs)


def greedy_reference(prompt: list[int], max_tokens: int) -> list[int]:
    """Tokens that a sequence must answer, whatever happens around it: no engine involved."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(int(fake_logits(tokens).argmax()))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]
