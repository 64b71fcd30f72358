"""Draft tokens in the GPU's own runner, its graphs and its draft layers, in Triton's interpreter: greedy text is that
of plain decoding, whatever comes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from draft_models import drafted
from fake_model import FakeTokenizer, check_pages, request, run, token_ids
from gpu import AVAILABLE, DEVICE, INTERPRETED, needs_triton
from plans import gpu_plan
from replayed_graphs import NotedHandoff, without_gpu
from sessions import plan as plain_plan
from tandem import _core
from tandem.checkpoint import load_model_config, open_checkpoint
from tandem.engine.engine import Engine
from tandem.engine.speculation.gpu_rollout import GpuRollouts
from tandem.engine.speculation.oracle_drafter import OracleDrafter
from tandem.engine.start.parts import EngineParts
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.reference import TorchOps
from tandem.mechanisms.gated_streams import torch as gates_torch
from tandem.mechanisms.router import torch as router_torch
from tandem.mechanisms.streams import torch as streams_torch
from tandem.models import build
from tandem.planner.choices.speculation import SpeculationPlan
from tandem.spec.state import page_tokens
from tiny import VOCAB

if AVAILABLE:
    from tandem.kernels.gpu import attention_decode as keys
    from tandem.kernels.gpu.ops import GpuOps
    from tandem.mechanisms.gated_streams import gpu as gates_gpu
    from tandem.mechanisms.latent.gpu import decode as latents
    from tandem.mechanisms.router import gpu as router_gpu
    from tandem.mechanisms.streams import gpu as streams_gpu

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.gpu, needs_triton, pytest.mark.skipif(not INTERPRETED, reason="graphs are run again here")]
MOST, ANSWER = 2, 8
PROMPTS = {"a": [7, 8, 9, 7, 8], "b": [40] * 9}
FAMILIES = ["kimi_linear", "bailing_hybrid", "glm5_next-pools", "qwen4_exp"]
Answers = dict[tuple[str, int], list[int]]


def gpu_ops(patch: pytest.MonkeyPatch) -> GpuOps:
    """GPU operations; those that keep no state are plain torch's, and keys have few parts: the interpreter is slow."""
    ops, torch_ops = GpuOps(DEVICE, CpuOps(_core.WorkerPool([-1]), "scalar")), TorchOps()
    for name in ("experts", "mlp", "rms_norm", "add_rms_norm"):
        patch.setattr(ops, name, getattr(torch_ops, name))
    for gpu, plain in ((streams_gpu, streams_torch), (router_gpu, router_torch), (gates_gpu, gates_torch)):
        patch.setattr(gpu, "bound", plain.bound)
    patch.setattr(latents, "parts_of_rows", lambda *_: 1)
    patch.setattr(keys, "PARTS", 2)
    return ops


def engine_of(
    path: Path, ops: GpuOps | TorchOps, algorithm: str = "", drafter: OracleDrafter | None = None, pages: int = 12
) -> Engine:
    """All steps that decode run in one graph of 6 rows. algorithm "": each decodes one token."""
    config = load_model_config(path)
    config = replace(config, drafter=config.drafts if algorithm == "NEXTN" else None)
    page, on_gpu = page_tokens(config.states, 4), not isinstance(ops, TorchOps)
    made = replace(
        plain_plan(), page_size=page, num_pages=pages, num_slots=1 + 3 * 2, max_running_requests=2, radix_cache=True,
        context_length=pages * page, gpu=gpu_plan(graph_sizes=(6,)) if on_gpu else None,
        speculation=SpeculationPlan(algorithm, MOST, False) if algorithm else None,
    )  # fmt: skip
    model, handoff = build(config, made, open_checkpoint(path), ops), NotedHandoff([]) if on_gpu else None
    return Engine.from_parts(EngineParts(made, config, model, FakeTokenizer(), handoff=handoff, drafter=drafter))


def answers(engine: Engine) -> Answers:
    asks = [request(name, prompt, max_tokens=ANSWER, ignore_eos=True) for name, prompt in PROMPTS.items()]
    found = {key: token_ids(outputs) for key, outputs in run(engine, *asks).items()}
    check_pages(engine)
    return found


def longer(engine: Engine, known: Answers) -> Answers:
    """An answer behind a prompt and all of its first answer, of which the engine still has the state."""
    outputs = run(engine, request("c", [*PROMPTS["b"], *known["b", 0]], max_tokens=3, ignore_eos=True))
    assert engine.stats().cached_tokens > 0
    return known | {key: token_ids(each) for key, each in outputs.items()}


@pytest.mark.parametrize(
    ("variant", "acceptance"), [("kimi_linear", 0.0), ("kimi_linear", 1.0), *((family, 0.5) for family in FAMILIES)]
)
def test_text_is_that_of_plain_decoding(
    tiny_models, monkeypatch: pytest.MonkeyPatch, variant: str, acceptance: float
) -> None:
    """None of the draft tokens is accepted, some, or all; then a prompt goes on from what they left."""
    plain = engine_of(tiny_models[variant], TorchOps())
    known = longer(plain, answers(plain))
    without_gpu(monkeypatch, [])
    drafter = OracleDrafter(known, acceptance, VOCAB)
    engine = engine_of(tiny_models[variant], gpu_ops(monkeypatch), "made up", drafter)
    assert longer(engine, answers(engine)) == known
    said = engine.stats().speculation
    assert said.draft_tokens > 0 and (said.accepted_tokens > 0) == (acceptance > 0)


def test_text_is_the_same_where_pages_are_few(tiny_models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers give way to each other, and are computed anew with draft tokens among them."""
    known = answers(engine_of(tiny_models["glm5_next"], TorchOps()))
    without_gpu(monkeypatch, [])
    drafter = OracleDrafter(known, 0.7, VOCAB)
    engine = engine_of(tiny_models["glm5_next"], gpu_ops(monkeypatch), "made up", drafter, pages=6)
    assert answers(engine) == known
    assert engine.stats().preemptions > 0 and engine.stats().speculation.accepted_tokens > 0


@pytest.mark.parametrize("variant", ["glm5_next-pools", "bailing_hybrid"])
def test_a_draft_layer_s_drafts_change_no_text(
    tiny_models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    path = drafted(tiny_models[variant], tmp_path / "m").path
    known = answers(engine_of(path, TorchOps()))
    without_gpu(monkeypatch, [])
    engine = engine_of(path, gpu_ops(monkeypatch), "NEXTN")
    chains = engine._speculation._drafter._chain
    assert isinstance(chains, GpuRollouts) and chains._recorded
    assert answers(engine) == known
    assert engine.stats().speculation.draft_tokens > 0
