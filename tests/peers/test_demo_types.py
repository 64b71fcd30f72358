"""benchmarks/peers/demo_types.py: the peer's KL is of each prediction; llama-cpp-python answers the lines of turns."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tandem.quality.measures import kept_rows
from tandem.quality.saved_logits import Origin, SavedLogits, writing
from tandem.quality.text import Windows

FOLDER = Path(__file__).parents[2] / "benchmarks" / "peers"
VOCAB = 7
WINDOWS = Windows(((1, 2, 3, 4), (5, 6, 1)))
# In place of the package: logits of a row are 100 * the row's place + the row's token + the number of the vocabulary.
PACKAGE = """
import numpy as np

class Llama:
    def __init__(self, model_path, n_ctx, n_batch, n_threads, n_threads_batch, logits_all, verbose):
        assert model_path == "m.gguf" and n_threads == n_threads_batch == 3
        self.logits_all, self.scores, self.n = logits_all, np.zeros((n_ctx, 7), np.float32), 0

    def reset(self):
        self.n = 0

    def eval(self, ids):
        for token in ids:
            self.scores[self.n] = 100 * self.n + token + np.arange(7) if self.logits_all else 0
            self.n += 1
"""


@pytest.fixture
def demo_types(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    import demo_types as module

    return module


class Peer:
    """An engine whose logits are the reference's plus `shift` at one token."""

    def __init__(self, logits: torch.Tensor, shift: float) -> None:
        self._windows, self._shift = list(logits.split([len(ids) for ids in WINDOWS.ids])), shift
        self.read: list[list[int]] = []

    def seconds(self, what: str) -> tuple[float, float]:
        command, count, read, written = what.split()
        self.read.append(np.fromfile(read, np.int32).tolist())
        assert command == "logits" and len(self.read[-1]) == int(count)
        found = self._windows[len(self.read) - 1].clone()
        found[:, 2] += self._shift
        Path(written).write_bytes(found.numpy().tobytes())
        return 0.0, 0.0


@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_the_peers_kl_is_of_each_prediction(demo_types: Any, tmp_path: Path, shift: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(len(WINDOWS.tokens), VOCAB)
    told = logits[WINDOWS.predicting]
    origin = Origin("m", WINDOWS.digest, len(told), VOCAB, VOCAB)
    with writing(tmp_path / "saved", origin) as writer:
        writer.append(kept_rows(told, WINDOWS.tokens[WINDOWS.predicting + 1]))
    peer = Peer(logits, shift)
    reference = demo_types.Reference(WINDOWS, SavedLogits(tmp_path / "saved"))
    result = demo_types.peer_divergence(peer, reference, tmp_path)
    assert peer.read == [list(ids) for ids in WINDOWS.ids]
    p, q = told.double().log_softmax(-1), told.clone()
    q[:, 2] += shift
    kl = (p.exp() * (p - q.double().log_softmax(-1))).sum(-1)
    assert result.mean == pytest.approx(float(kl.mean()), abs=1e-12)
    assert result.same_top == float((q.argmax(-1) == told.argmax(-1)).double().mean())
    assert (result.same_top == 1.0) is (shift == 0.0)


def test_llama_cpp_python_answers_the_lines_of_turns(tmp_path: Path) -> None:
    (tmp_path / "llama_cpp.py").write_text(PACKAGE)
    ids = np.asarray([3, 1, 2], np.int32)
    (tmp_path / "in").write_bytes(ids.tobytes())
    lines = f"prompt 5\ndecode 4\nlogits 3 {tmp_path / 'in'} {tmp_path / 'out'}\n"
    done = subprocess.run(
        [sys.executable, str(FOLDER / "llama_cpp_turns.py"), "m.gguf", "3"], input=lines, capture_output=True,
        text=True, env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [len(line.split()) for line in done.stdout.splitlines()] == [2, 2, 2]
    expected = 100 * np.arange(3)[:, None] + ids[:, None] + np.arange(7)
    assert np.array_equal(np.fromfile(tmp_path / "out", np.float32).reshape(3, 7), expected)


def test_the_table_has_both_beside_each_other(demo_types: Any) -> None:
    row = {
        "format": "q8_0", "activations": "exact here, int8 there", "version": "1", "decode_tok_s": 50.0,
        "decode_tok_s_peer": 40.0, "prompt_512_tok_s": 800.0, "prompt_512_tok_s_peer": 300.0, "kl": 0.00082,
        "kl_error": 0.00003, "same_top": 0.98, "kl_peer": 0.002, "kl_error_peer": 0.0001, "same_top_peer": 0.97,
    }  # fmt: skip
    lines = demo_types.table([row]).splitlines()[2:]
    assert lines == [
        "| q8_0, exact here, int8 there | Tandem | 50 | 800 | 0.00082 ± 0.00003 | 98.00% |",
        "| q8_0, exact here, int8 there | llama.cpp 1 | 40 | 300 | 0.00200 ± 0.00010 | 97.00% |",
    ]
