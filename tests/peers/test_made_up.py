"""benchmarks/peers: made-up GGUF files, GGUF's types in turns with llama.cpp, and llama-bench beside a GPU model."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from tandem.bench.formats import GGUF
from tandem.checkpoint import load_model_config, open_checkpoint

FOLDER = Path(__file__).parents[2] / "benchmarks" / "peers"


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.mark.parametrize("kind", GGUF)
def test_a_made_up_file_is_read_by_both_readers(tmp_path: Path, kind: str) -> None:
    import made_up_gguf as made

    sizes = made.Sizes(256, 256, 2, 2, 1, 4, 2, 300, head_dim=128)
    file = made.write(tmp_path / "m.gguf", sizes, made.FileTypes(kind, "q6_k", "q4_0", "q6_k"))
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    gates = tensors["blk.1.ffn_gate_exps.weight"]
    assert gates.tensor_type.name.lower() == kind
    assert np.isfinite(gguf.dequantize(gates.data, gates.tensor_type)).all()
    assert float(np.abs(tensors["output_norm.weight"].data - 1).max()) == 0
    config = load_model_config(file)
    assert (config.hidden, len(config.layers), config.moe.router.num_experts) == (256, 2, 4)
    assert open_checkpoint(file).formats().experts.quantised


def test_ratios_are_of_pairs_in_turns() -> None:
    """Twice as slow a machine in a round changes no ratio."""
    import gguf_types as types

    asked: list[str] = []

    class Engine:
        def __init__(self, name: str, times: list[float]) -> None:
            self.name, self.times = name, [9.0, *times]

        def seconds(self, _what: str) -> tuple[float, float]:
            asked.append(self.name)
            clock = self.times.pop(0)
            return clock, clock / 2

    found = types.measured(Engine("kt", [1.0, 2.0, 1.0]), Engine("peer", [1.5, 3.0, 1.5]), "decode 8", 3)
    assert asked == ["kt", "peer", "kt", "peer", "peer", "kt", "kt", "peer"]
    assert found["decode_ratio"] == found["decode_cpu_ratio"] == 1.5
    assert found["decode_tok_s"] == 8.0 and found["decode_cpu_ms"] == 62.5


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A llama-bench that answers with what it was asked, and is faster with some flags."""
    path = tmp_path / "llama-bench"
    path.write_text(
        f"#!{sys.executable}\nimport json, sys\nwords = sys.argv\n"
        "value = lambda name: words[words.index(name) + 1] if name in words else '0'\n"
        "if value('--repack') == '1' and value('-ncmoe') == '24': sys.exit(1)\n"
        "rate = 100 + 10 * int(value('--repack'))\n"
        "rows = [{'n_prompt': int(p), 'n_gen': 0} for p in value('-p').split(',')]\n"
        "rows.append({'n_prompt': 0, 'n_gen': int(value('-n'))})\n"
        "print(json.dumps([row | {'avg_ts': rate, 'build_number': 7, 'build_commit': 'c'} for row in rows]))\n"
    )
    path.chmod(0o755)
    return path


def test_the_best_flags_of_llama_bench_count(program: Path) -> None:
    import llama_bench

    peer = llama_bench.Peer(program, Path("m.gguf"), 48, 15)
    rates = peer.rates(0.0)
    assert rates == {("decode", 64): 110.0, ("prompt", 512): 110.0, ("prompt", 2048): 100.0, ("prompt", 8192): 100.0}
    assert "--repack 1" in peer.best[0.0, ("decode", 64)] and "-ncmoe 48" in peer.best[0.0, ("decode", 64)]
    assert peer.version == "7 c"
    assert peer.rates(0.5)["decode", 64] == 100.0, "flags that fail are left out"
    assert set(peer.rates(1.0).values()) == {100.0} and "-ncmoe" not in peer.best[1.0, ("decode", 64)]


def test_rows_have_both_engines_medians(program: Path) -> None:
    import llama_bench

    @dataclasses.dataclass
    class Ours:
        rounds: list[float]

        def rates(self) -> dict[tuple[str, int], float]:
            return {("decode", 64): self.rounds.pop(0)}

    peer = llama_bench.Peer(program, Path("m.gguf"), 48, 15)
    late = llama_bench.in_turns(Ours([200.0, 1.0]), peer, 1.0, 2, until=0.0)
    assert late["kt"] == {("decode", 64): [200.0]}, "no second round after the deadline"
    found = llama_bench.in_turns(Ours([200.0, 210.0, 400.0]), peer, 1.0, 3, until=float("inf"))
    [row] = llama_bench.rows_of(found, peer, 1.0, "q4_0")
    assert (row["tok_s"], row["tok_s_peer"], row["ratio"], row["dense"]) == (210.0, 100.0, 2.1, "int4-g128")
    assert json.loads(json.dumps(row))["what"] == "decode"
