"""The engine around random logits over bytes: what is sensible in its answers is a grammar's doing."""

from __future__ import annotations

import numpy as np

from fake_model import FakeModel, fake_config, fake_plan, run
from tandem.engine.engine import Engine
from tandem.engine.protocol import GenerateRequest, Grammar, SamplingSettings, TokenOutput
from tandem.engine.start.parts import EngineParts
from tandem.text.token_table import TokenTable

EOS, MARKER = 256, 257
PIECES = ['": "', '", "', '": ', '{"', '"}', "true", "null", "  ", "12", '"', "é", "ab"]
TOKENS, VOCAB = 258 + len(PIECES), 300  # the model has more rows than the tokenizer has tokens


class ByteTokenizer:
    """Bytes, two control tokens, and some longer tokens."""

    eos_ids = (EOS,)
    bos_id = None

    def token_table(self) -> TokenTable:
        pieces = [bytes([i]) for i in range(256)] + [b"<eos>", b"<mark>"] + [p.encode() for p in PIECES]
        return TokenTable(tuple(pieces), {EOS: "<eos>", MARKER: "<mark>"})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        hidden = {EOS, MARKER} if skip_special_tokens else set()
        pieces = self.token_table().pieces
        return b"".join(pieces[i] for i in ids if i < TOKENS and i not in hidden).decode(errors="replace")


class RandomModel(FakeModel):
    """Wants anything: control tokens, rows that are no tokens. It ends strings, lists and objects sooner or later."""

    def _row(self, batch, layer, row: int) -> np.ndarray:
        super()._row(batch, layer, row)
        s = int(np.searchsorted(batch.query_starts.numpy(), row, side="right")) - 1
        length = int(batch.positions[row]) + 1
        pages = batch.block_tables[s, : -(-length // layer[0].shape[1])].long()
        seed = layer[0][pages].flatten()[:length].numpy().astype(np.int64)
        logits = np.random.default_rng(seed).normal(0.0, 1.0, VOCAB).astype(np.float32)
        logits[[EOS, MARKER, VOCAB - 1]] += 4.0
        logits[[ord(c) for c in '"}],']] += 4.0
        return logits


def engine(**plan) -> Engine:
    config = fake_config()
    object.__setattr__(config, "vocab", VOCAB)
    object.__setattr__(config, "eos_ids", (EOS,))
    plan = {"context_length": 4096, "num_pages": 4096, "max_running_requests": 64} | plan
    made = Engine.from_parts(EngineParts(fake_plan(**plan), config, RandomModel(), ByteTokenizer()))
    made.grammars.be_patient()  # nothing here depends on how busy the machine is
    return made


def beside(model: Engine, **plan) -> Engine:
    """Another one, whose grammars the same process compiles: its own would take seconds to start. Do not close it."""
    return lends_compiler(model, engine(**plan))


def lends_compiler(model: Engine, made: Engine) -> Engine:
    made.grammars._compiler._ready = model.grammars._compiler._started()
    return made


def request(name: str, grammar: Grammar | None, prompt: str = "?", **sampling) -> GenerateRequest:
    sampling = {"temperature": 1.0, "seed": 5, "max_tokens": 2000} | sampling
    return GenerateRequest(
        id=name, prompt_ids=list(prompt.encode()), sampling=SamplingSettings(grammar=grammar, **sampling)
    )


def answer(model: Engine, grammar: Grammar | None, **sampling) -> list[TokenOutput]:
    return run(model, request("x", grammar, **sampling))["x", 0]
