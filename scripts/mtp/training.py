"""Trains a draft layer on texts that the model wrote, to say what the model would say."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from mtp.layer import Layer
from torch import Tensor

ROWS, PIECE = 1024, 320  # of a batch, and tokens of a text in it
PROMPT_SHARE = 0.25  # of rows that the model did not write
CHAIN_WEIGHTS = (1.0, 0.7, 0.5)
LIKELY = 24  # tokens of the model's distribution that count
HARD = 0.5  # the share of the loss that the token that came has; the model's distribution has the rest


@dataclass(frozen=True, slots=True)
class Text:
    """tokens int64 [n]; hidden [n - 1, H]: what the model's last norm made; the answer begins at `prompt`."""

    tokens: Tensor
    hidden: Tensor
    prompt: int
    kind: str = ""
    greedy: bool = True


@dataclass(frozen=True, slots=True)
class Head:
    """embedding [V, H], which is the head too; ids [v]: tokens that are drafted, rising."""

    embedding: Tensor
    ids: Tensor

    @property
    def rows(self) -> Tensor:
        return self.embedding[self.ids]


def frequent(texts: list[Text], vocab: int, count: int) -> Tensor:
    """The tokens that answers have most often; then those of prompts."""
    seen = torch.zeros(vocab, dtype=torch.float64)
    for text in texts:
        seen += torch.bincount(text.tokens[text.prompt :], minlength=vocab)
        seen += 0.01 * torch.bincount(text.tokens[: text.prompt], minlength=vocab)
    return seen.topk(count).indices.sort().values


@torch.no_grad()
def fitted(layer: Layer, head: Head, texts: list[Text], most: int = 100_000) -> None:
    """Where training begins: the projection that comes nearest to the model's next hidden state, by least squares."""
    size = head.embedding.shape[1]
    both, cross, rows = torch.zeros(2 * size, 2 * size), torch.zeros(2 * size, size), 0
    scale = layer.shared_head["norm"].weight
    for text in texts:
        hidden, tokens = text.hidden[:-1], text.tokens[1:-1]
        x = torch.cat((layer.enorm(head.embedding[tokens]), layer.hnorm(hidden.float())), -1).to(
            torch.bfloat16
        )
        y = (text.hidden[1:].float() / scale).to(torch.bfloat16)
        both += (x.T @ x).float()
        cross += (x.T @ y).float()
        rows += len(x)
        if rows > most:
            break
    both += torch.eye(2 * size) * both.diagonal().mean() * 1e-3
    layer.eh_proj.weight.copy_(torch.linalg.solve(both, cross).T)


def train(
    layer: Layer, head: Head, texts: list[Text], *, seconds: float, rate: float, seed: int = 0
) -> Iterator[str]:
    """Says now and then where it is. The rate falls with the time that is over."""
    weights = [p for p in layer.parameters() if p.dim() > 1]
    others = [p for p in layer.parameters() if p.dim() <= 1]
    groups = [{"params": weights, "weight_decay": 0.02}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))
    said, mean = Said(head), 0.0
    started = perf_counter()
    pieces = [piece for text in texts for piece in cut(text)]
    for step, batch in enumerate(_batches(pieces, seed), 1):
        over = (perf_counter() - started) / seconds
        if over >= 1:
            return
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, step / 20) * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * over)))
        steps = 1 if over < 0.6 else 2 if over < 0.85 else 3
        loss, first = _loss(layer, said, batch, steps)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
        mean = first if step == 1 else 0.95 * mean + 0.05 * first
        if step % 20 == 0:
            yield f"step {step}, {perf_counter() - started:.0f} s, chain {steps}, first token's loss {mean:.3f}"


def _batches(texts: list[Text], seed: int) -> Iterator[list[Text]]:
    """Texts of about equal length together, without end."""
    chance = random.Random(seed)
    while True:
        order = sorted(texts, key=lambda text: len(text.tokens) + chance.random() * 60)
        batches, batch = list[list[Text]](), list[Text]()
        for text in order:
            if batch and (len(batch) + 1) * len(text.tokens) > ROWS:
                batches.append(batch)
                batch = []
            batch.append(text)
        batches.append(batch)
        chance.shuffle(batches)
        yield from batches


def _loss(layer: Layer, said: Said, batch: list[Text], steps: int) -> tuple[Tensor, float]:
    """Loss of all draft tokens; and that of the first ones. A part of the prompts' rows stands for all of them."""
    total, first = torch.zeros(()), 0.0
    tokens, hidden, counted = padded(batch)
    likely, shares = said.of(batch, counted.shape[1])
    with torch.autocast("cpu", torch.bfloat16):
        found = layer.chain(hidden.to(torch.bfloat16), said.embedding[tokens], steps)
        for k, x in enumerate(found):
            chosen = counted.clone()
            chosen[:, :k] = False
            logits = x[chosen] @ said.rows.T
            wanted = (logits.gather(1, likely[chosen]).float() * shares[chosen].float()).sum(-1)
            loss = (logits.float().logsumexp(-1) * shares[chosen].float().sum(-1) - wanted).mean()
            total = total + CHAIN_WEIGHTS[k] * loss
            first = float(loss.detach()) if k == 0 else first
    return total, first


class Said:
    """The model's output behind each row: its likeliest tokens among those that are drafted, and their shares; and the
    token that came. Computed once for each text."""

    def __init__(self, head: Head) -> None:
        self.embedding, self.rows = head.embedding.to(torch.bfloat16), head.rows.to(torch.bfloat16)
        self._lookup = torch.full((len(head.embedding),), -1)
        self._lookup[head.ids] = torch.arange(len(head.ids))
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, batch: list[Text], rows: int) -> tuple[Tensor, Tensor]:
        likely = torch.zeros(len(batch), rows, LIKELY + 1, dtype=torch.int64)
        shares = torch.zeros(len(batch), rows, LIKELY + 1)
        for i, text in enumerate(batch):
            if id(text) not in self._known:
                self._known[id(text)] = self._say(text)
            own = self._known[id(text)]
            likely[i, : len(own[0])], shares[i, : len(own[0])] = own[0].long(), own[1].float()
        return likely, shares

    @torch.no_grad()
    def _say(self, text: Text) -> tuple[Tensor, Tensor]:
        logits = (text.hidden[1:] @ self.rows.T).float()
        best, ids = logits.topk(LIKELY, sorted=False)
        shares = (best - logits.logsumexp(-1, keepdim=True)).exp() * (1 - HARD)
        came = self._lookup[text.tokens[2:]]
        hard = torch.where(came >= 0, HARD, 0.0)[:, None]
        return torch.cat([ids, came.clamp_min(0)[:, None]], 1).to(torch.int16), torch.cat(
            [shares, hard], 1
        ).half()


def cut(text: Text) -> list[Text]:
    """Pieces of equal length, of PIECE tokens at most: attention in chains takes the square of it."""
    count = -(-len(text.tokens) // PIECE)
    size = -(-len(text.tokens) // count)
    starts = range(0, len(text.tokens) - 8, size)
    return [
        replace(
            text, tokens=text.tokens[a : a + size], hidden=text.hidden[a : a + size - 1],
            prompt=max(text.prompt - a, 0),
        )
        for a in starts
    ]  # fmt: skip


def padded(batch: list[Text]) -> tuple[Tensor, Tensor, Tensor]:
    """Rows p: tokens at p + 1, hidden states at p, and which rows count, [B, n - 2]."""
    longest = max(len(text.tokens) for text in batch) - 2
    tokens = torch.zeros(len(batch), longest, dtype=torch.int64)
    hidden = torch.zeros(len(batch), longest, batch[0].hidden.shape[1], dtype=batch[0].hidden.dtype)
    counted = torch.zeros(len(batch), longest, dtype=torch.bool)
    for i, text in enumerate(batch):
        n = len(text.tokens) - 2
        tokens[i, :n], hidden[i, :n] = text.tokens[1:-1], text.hidden[:-1]
        counted[i, :n] = (torch.arange(n) >= text.prompt - 2) | (torch.rand(n) < PROMPT_SHARE)
    return tokens, hidden, counted


@torch.no_grad()
def acceptance(layer: Layer, head: Head, texts: list[Text], steps: int = 3) -> list[float]:
    """Shares over answers: how often the first draft token is accepted, the second where the first is, and so on."""
    right = torch.zeros(steps + 1)
    for text in texts:
        hidden = text.hidden[None, :-1].float()
        with torch.autocast("cpu", torch.bfloat16):
            found = layer.chain(hidden, head.embedding[text.tokens[None, 1:-1]], steps)
            draft_tokens = [head.ids[(x[0] @ head.rows.T).argmax(-1)] for x in found]
        # a chain that begins at row p: draft token k is row p + k, and its token comes at p + k + 2
        starts = torch.arange(max(text.prompt - 2, 0), len(text.tokens) - 2 - steps + 1)
        alive = torch.ones(len(starts), dtype=torch.bool)
        right[0] += len(starts)
        for k, draft_token in enumerate(draft_tokens):
            alive &= draft_token[starts + k] == text.tokens[starts + k + 2]
            right[k + 1] += alive.sum()
    return (right[1:] / right[:-1].clamp_min(1)).tolist()
