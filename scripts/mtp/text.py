"""A model's own answers to `prompts`, each with the hidden states that a draft layer reads."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from mtp.prompts import Prompt
from mtp.training import Text
from safetensors.torch import save_file
from torch import Tensor

from tandem.engine.engine import Engine
from tandem.engine.protocol import GenerateRequest, SamplingSettings
from tandem.engine.sequence import Sequence
from tandem.engine.start.loader import load_parts
from tandem.flags.engine_config import EngineConfig

TEMPERATURES = (0.0, 0.0, 0.2, 0.7)
ANSWERS = (120, 250, 400)  # most tokens of one
MOST_PROMPT, ROOM = 600, 1100  # tokens


def written(
    model: str, shape: Any, prompts: Iterator[Prompt], *, batch: int, seconds: float, seed: int
) -> list[Text]:
    """As many as are done in the time. shape: `layer.Shape`, for a layer that does nothing but make the engine keep
    hidden states."""
    with TemporaryDirectory(prefix="tandem-mtp-") as folder:
        write_draft(Path(folder), model, shape, _nothing(shape), torch.arange(64))
        parts = load_parts(EngineConfig.from_keywords(
            model, device="cpu", kt_method="BF16", max_running_requests=batch, max_total_tokens=batch * ROOM,
            disable_radix_cache=True, speculative_algorithm="NEXTN", speculative_draft_model_path=folder,
        ))  # fmt: skip
    kept = _Kept(parts.model)
    engine = Engine.from_parts(replace(parts, plan=replace(parts.plan, speculation=None)))
    return list(_answers(engine, kept, prompts, batch, seconds, random.Random(seed)))


def _answers(
    engine: Engine, kept: _Kept, prompts: Iterator[Prompt], batch: int, seconds: float, chance: random.Random
) -> Iterator[Text]:
    live, numbers, started = dict[str, tuple[Sequence, str, float]](), count(), perf_counter()
    while perf_counter() - started < seconds:
        while len(live) < batch:
            prompt = next(prompts)
            ids = _encoded(engine.tokenizer, prompt)
            if len(ids) > MOST_PROMPT:
                continue
            name, heat = str(next(numbers)), chance.choice(TEMPERATURES)
            how = SamplingSettings(temperature=heat, top_p=0.9 if heat else 1.0, seed=chance.randrange(1 << 30),
                                 max_tokens=min(1000 - len(ids), chance.choice(ANSWERS)))  # fmt: skip
            engine.add(GenerateRequest(id=name, prompt_ids=ids, sampling=how))
            live[name] = engine._answers[name][0].sequence, prompt.kind, heat
        outputs = engine.step()
        if failed := [output.error for output in outputs if output.error]:
            raise SystemExit(f"an answer failed: {failed[0]}")
        ended = [output.id for output in outputs if output.finish_reason]
        kept.note([sequence for sequence, _, _ in live.values()])
        for name in ended:
            sequence, kind, heat = live.pop(name)
            if (hidden := kept.taken(sequence)) is not None:
                yield Text(torch.tensor(sequence.tokens), hidden, sequence.prompt_len, kind, heat == 0)


def _encoded(tokenizer: Any, prompt: Prompt) -> list[int]:
    if prompt.raw:
        return list(tokenizer.encode(prompt.said))
    said = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt.said}], add_generation_prompt=True
    )
    return list(tokenizer.encode(said + prompt.begun, add_special_tokens=False))


class _Kept:
    """Outputs of a model's last norm for each row, by the first page of the sequence whose it is."""

    def __init__(self, model: Any) -> None:
        self._rows, self._pages, self._inner = (
            dict[int, list[tuple[Tensor, Tensor]]](),
            dict[str, int](),
            model._logits_rows,
        )
        model._logits_rows = self._keep

    def _keep(self, x: Tensor, p: Any, states: Any) -> Tensor:
        batch = p.batch
        starts = batch.query_starts.tolist()
        for s, page in enumerate(batch.block_tables[:, 0].tolist()):
            rows = slice(starts[s], starts[s + 1])
            both = batch.positions[rows].clone(), x[rows].to(torch.bfloat16, copy=True)
            self._rows.setdefault(page, []).append(both)
        return self._inner(x, p, states)  # type: ignore[no-any-return]

    def note(self, running: list[Sequence]) -> None:
        for each in running:
            if each.num_pages:
                self._pages.setdefault(each.request_id, int(each.page_table[0]))

    def taken(self, sequence: Sequence) -> Tensor | None:
        """[tokens - 1, hidden]; None where rows are missing."""
        count = len(sequence.tokens) - 1
        rows = self._rows.pop(self._pages.pop(sequence.request_id, -1), [])
        hidden, there = None, torch.zeros(count, dtype=torch.bool)
        for positions, x in rows:
            hidden = torch.zeros(count, x.shape[1], dtype=x.dtype) if hidden is None else hidden
            own = positions < count
            hidden[positions[own]], there[positions[own]] = x[own], True
        return hidden if there.all() else None


def _nothing(shape: Any) -> dict[str, Tensor]:
    from mtp.layer import Layer

    return Layer(shape).state_dict()


def write_draft(folder: Path, model: str, shape: Any, weights: dict[str, Tensor], ids: Tensor) -> None:
    """Writes the directory that `--speculative-draft-model-path` reads. ids: tokens that are drafted, rising."""
    from tandem.checkpoint import resolve_model

    said = json.loads((resolve_model(model) / "config.json").read_text(encoding="utf-8"))
    before = f"model.layers.{said['num_hidden_layers']}."
    said |= {
        "num_nextn_predict_layers": 1, "mtp_mlp_layer_types": ["dense"], "intermediate_size": shape.width,
        "draft_vocab_size": len(ids),
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
    tensors = {before + name: weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    places = (ids - torch.arange(len(ids))).to(torch.int32)
    save_file(tensors | {f"{before}d2t": places}, folder / "draft.safetensors", {"format": "pt"})
    (folder / "draft.safetensors").chmod(0o644)
