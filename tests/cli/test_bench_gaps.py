"""`kt bench serve --long-prompt`: which gaps it counts, a server with the echo model, and made-up weights."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest

from echo_engine import CONTEXT
from quiet_clock import PATIENCE
from server_harness import ServerProcess, running, spawn_echo
from tandem.bench import architectures, load_client
from tandem.bench.gaps import made_up, rows
from tandem.bench.gaps.readers import (
    FIRST_PIECES,
    OWN_TOKENS,
    Gap,
    GapFigures,
    GapLoad,
    LongPrompt,
    LongPrompts,
)
from tandem.bench.load_client import LoadError, SentRequest, ServedExperts
from tandem.engine.protocol import GenerateRequest, SamplingSettings
from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.text.detokenizer import IncrementalDecoder
from tandem.text.tokenizer import Tokenizer

SMALL = {
    "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "intermediate_size": 128, "norm_topk_prob": True, "vocab_size": 1000,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
}  # fmt: skip


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running(spawn_echo(tmp_path_factory.mktemp("echo") / "server.log")) as server:
        yield server


@pytest.fixture(autouse=True)
def small_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_client, "FIRST_ID", 10)
    monkeypatch.setattr(load_client, "LAST_ID", 250)


def answer(*pieces: float) -> SentRequest:
    """Behind those that are not counted."""
    return SentRequest(0.0, 5, pieces=[0.0] * FIRST_PIECES + list(pieces), tokens=9)


def request(url: str, wanted: GapLoad) -> rows.GapFlags:
    return rows.GapFlags("echo", url, None, None, wanted, None, ())


def test_a_gap_is_beside_a_prompt_if_it_overlaps_it() -> None:
    prompts = [LongPrompt(3.5, 4.5), LongPrompt(7, 8)]
    found = GapFigures(answers=[answer(1, 2, 3, 5, 6), answer(4, 9)], loaded_prompts=prompts)
    assert found.idle_gaps() == [Gap(1, 2), Gap(2, 3)]
    assert found.loaded_gaps() == [Gap(3, 5), Gap(4, 9)]
    assert (
        list(GapFigures(answers=[answer(1, 2)]).gaps()) == [Gap(1, 2)] == GapFigures(answers=[answer(1, 2)]).idle_gaps()
    )


def test_pieces_are_counted_soon() -> None:
    found = GapFigures(answers=[answer(1, 2, 3, 5, 6), answer(4, 9), SentRequest(0.0, 5, pieces=[1.0, 2.0])])
    assert found.pieces() == 7 and found.pieces(2.5, 5.5) == 3 and found.pieces(10.0) == 0


@pytest.mark.parametrize("tokens", [1, OWN_TOKENS, 3 * OWN_TOKENS])
def test_long_prompts_begin_differently(tokens: int) -> None:
    prompts = LongPrompts("echo", tokens, random.Random(3))
    first, second = (json.loads(prompts.next()) for _ in range(2))
    assert len(first["prompt"]) == len(second["prompt"]) == tokens and first["max_tokens"] == 1
    assert first["prompt"][OWN_TOKENS:] == second["prompt"][OWN_TOKENS:]
    assert tokens == 1 or first["prompt"][:OWN_TOKENS] != second["prompt"][:OWN_TOKENS]


def test_a_row_says_medians_and_the_longest() -> None:
    ticks = [0.01 * i for i in range(101)]
    found = GapFigures(
        idle_prompts=[LongPrompt(0, 1), LongPrompt(0, 2), LongPrompt(0, 4)],
        answers=[answer(*ticks, 1.1, 1.9)],
        loaded_prompts=[LongPrompt(1.05, 6.05)],
    )
    row = rows.row_of(request("http://x", GapLoad(1000)), "echo", found, ServedExperts(0.5, "uniform", True))
    assert (row["gpu_share"], row["placement"], row["live"]) == (0.5, "uniform", True)
    assert row["idle_p50_ms"] == pytest.approx(10, abs=0.01) and row["idle_gaps"] == 100
    assert (row["gaps"], row["beside_max_ms"]) == (2, 800.0)
    assert (row["prompt_alone_tok_s"], row["prompt_tok_s"], row["prompt_share"]) == (500.0, 200.0, 0.4)
    assert row["beside_p99_ms"] == pytest.approx(100 + 0.99 * 700)
    assert row["p99_over_idle"] == pytest.approx(79.3, abs=0.1)
    with pytest.raises(LoadError, match="give a shorter --long-prompt"):
        rows.row_of(request("http://x", GapLoad(1000)), "echo", GapFigures(), ServedExperts())


def test_a_server_is_measured(echo, tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib")
    wanted = GapLoad(prompt_len=1500, input_len=20, output_len=400, gaps=30, prompts=2, seconds=PATIENCE)
    out, picture = tmp_path / "out" / "gaps.json", tmp_path / "gaps.png"
    rows.run(request(echo.url, wanted), out, picture)
    [row] = json.loads(out.read_text())
    assert (row["bench"], row["config"], row["gpu_share"], row["tokens"]) == ("gaps", "echo", 0.0, 1500)
    assert row["idle_gaps"] >= 30 and row["gaps"] >= 30 and row["prompts"] >= 2
    assert 0 < row["idle_p50_ms"] <= row["idle_p99_ms"] and row["beside_p99_ms"] <= row["beside_max_ms"]
    assert row["prompt_tok_s"] > 0 and row["prompt_alone_tok_s"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "Drawn to" in capsys.readouterr().out


def test_a_refused_prompt_is_said(echo) -> None:
    with pytest.raises(LoadError, match="a request failed: 400"):
        rows.run(request(echo.url, GapLoad(prompt_len=CONTEXT + 1)), None, None)


def test_made_up_weights_are_served(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(architectures.CONFIGS, "small", SMALL)
    made_up.write_folder(tmp_path, "small", 2)
    flags = ["--device", "cpu", "--kt-method", "INT8", "--max-total-tokens", "512", "--kt-cpuinfer", "1"]
    loaded = made_up.load_engine(EngineConfig.from_args([str(tmp_path), *flags]))
    engine, model = loaded.engine, loaded.engine.model_config
    assert (loaded.vocab_size, len(model.layers), loaded.plan.expert_format) == (1000, 2, "int8")
    try:
        sampling = SamplingSettings(max_tokens=3, temperature=0.0, ignore_eos=True)
        engine.add(GenerateRequest(id="a", prompt_ids=[300, 301, 302], sampling=sampling))
        outputs = []
        while engine.has_work():
            outputs += engine.step()
        ids = [token for output in outputs for token in output.token_ids]
        assert len(ids) == 3 and outputs[-1].finish_reason == "length"
        assert loaded.engine.tokenizer.decode([300, 301]) == " 300 301"
    finally:
        engine.close()


def test_every_made_up_token_is_text_of_its_own(tmp_path, monkeypatch) -> None:
    """Else a reader gets several at once, which looks like a gap."""
    monkeypatch.setitem(architectures.CONFIGS, "small", SMALL)
    made_up.write_folder(tmp_path, "small", 2)
    decoder = IncrementalDecoder(Tokenizer.load(tmp_path), [], True)
    texts = [decoder.push(token) for token in range(SMALL["vocab_size"])]
    assert all(texts) and len(set(texts)) == len(texts)


def test_unknown_names_are_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        made_up.write_folder(tmp_path, "nonsense", None)
