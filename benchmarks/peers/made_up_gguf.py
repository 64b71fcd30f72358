"""GGUF files of a Qwen3-MoE model with made-up weights, as large as one likes, written at the speed of the disk.

Embedded tokens are so large that what layers add hardly counts: each token chooses experts of its own, in any engine.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tandem.bench.formats import GGUF, SMALL_HALF

KINDS = {
    "f32": 0, "q4_0": 2, "q4_1": 3, "q8_0": 8, "q2_k": 10, "q3_k": 11, "q4_k": 12, "q5_k": 13, "q6_k": 14,
    "iq2_xxs": 16, "iq2_xs": 17, "iq3_xxs": 18, "iq1_s": 19, "iq4_nl": 20, "iq3_s": 21, "iq2_s": 22, "iq4_xs": 23,
    "bf16": 30,
}  # fmt: skip
"""Numbers of ggml's types (ggml.h)."""

ALIGNMENT = 32
POOL_BLOCKS = 8191  # a prime: rows of a matrix differ
EMBEDDED, ROUTER = 8.0, 0.02  # standard deviations


@dataclass(frozen=True, slots=True)
class Sizes:
    hidden: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    experts: int
    top_k: int
    vocab: int
    head_dim: int = 128


QWEN3_30B = Sizes(2048, 768, 48, 32, 4, 128, 8, 151936)
QWEN3_235B = Sizes(4096, 1536, 94, 64, 4, 128, 8, 151936)


@dataclass(frozen=True, slots=True)
class FileTypes:
    """Types of the experts' gates and ups, and downs; of the other projections; of embedded tokens and the head."""

    experts: str
    down: str
    dense: str
    head: str


def write(path: Path, sizes: Sizes, types: FileTypes) -> Path:
    """Raises OSError where there is no room."""
    tensors, offset, header = list(_tensors(sizes, types)), 0, b""
    for name, shape, kind in tensors:
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        header += _text(name) + dims + struct.pack("<IQ", KINDS[kind], offset)
        offset += _padded(_bytes(shape, kind))
    pairs = list(_metadata(sizes))
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs) + header)
        file.write(bytes(-file.tell() % ALIGNMENT))
        for name, shape, kind in tensors:
            _fill(file, name, kind, _bytes(shape, kind))
    return path


def _tensors(sizes: Sizes, types: FileTypes) -> Iterator[tuple[str, tuple[int, ...], str]]:
    hidden, width, head = sizes.hidden, sizes.width, sizes.head_dim
    yield "token_embd.weight", (sizes.vocab, hidden), "bf16"
    yield "output_norm.weight", (hidden,), "f32"
    yield "output.weight", (sizes.vocab, hidden), types.head
    for number in range(sizes.layers):
        layer = f"blk.{number}."
        for name, rows, columns in (
            ("attn_q", sizes.heads * head, hidden), ("attn_k", sizes.kv_heads * head, hidden),
            ("attn_v", sizes.kv_heads * head, hidden), ("attn_output", hidden, sizes.heads * head),
        ):  # fmt: skip
            yield f"{layer}{name}.weight", (rows, columns), types.dense
        for name, length in (("attn_norm", hidden), ("attn_q_norm", head), ("attn_k_norm", head), ("ffn_norm", hidden)):
            yield f"{layer}{name}.weight", (length,), "f32"
        yield f"{layer}ffn_gate_inp.weight", (sizes.experts, hidden), "f32"
        yield f"{layer}ffn_gate_exps.weight", (sizes.experts, width, hidden), types.experts
        yield f"{layer}ffn_up_exps.weight", (sizes.experts, width, hidden), types.experts
        yield f"{layer}ffn_down_exps.weight", (sizes.experts, hidden, width), types.down


def _bytes(shape: tuple[int, ...], kind: str) -> int:
    count = int(np.prod(shape, dtype=np.int64))
    if kind in ("f32", "bf16"):
        return count * (4 if kind == "f32" else 2)
    assert shape[-1] % GGUF[kind].weights == 0, (shape, kind)
    return count // GGUF[kind].weights * GGUF[kind].bytes


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _fill(file: BinaryIO, name: str, kind: str, size: int) -> None:
    if "norm" in name:
        return _repeat(file, np.ones(1, np.float32).tobytes(), size)
    random = np.random.default_rng(sum(name.encode()))
    if kind in ("f32", "bf16"):
        numbers = random.standard_normal(min(size // 2, 1 << 24), np.float32)
        numbers *= EMBEDDED if "embd" in name else ROUTER
        whole = numbers if kind == "f32" else (numbers.view(np.uint32) >> 16).astype(np.uint16)
        return _repeat(file, whole.tobytes(), size)
    blocks = random.integers(0, 256, (POOL_BLOCKS, GGUF[kind].bytes), np.uint8)
    for at in GGUF[kind].halves:
        blocks[:, at], blocks[:, at + 1] = SMALL_HALF & 255, SMALL_HALF >> 8
    _repeat(file, blocks.tobytes(), size)


def _repeat(file: BinaryIO, pool: bytes, size: int) -> None:
    """And zeros up to the next tensor."""
    piece = memoryview(pool * max(1, (16 << 20) // len(pool)))
    for first in range(0, size, len(piece)):
        file.write(piece[: min(len(piece), size - first)])
    file.write(bytes(-size % ALIGNMENT))


def _metadata(sizes: Sizes) -> Iterator[bytes]:
    yield _pair("general.architecture", "qwen3moe")
    for key, number in (
        ("block_count", sizes.layers), ("context_length", 40960), ("embedding_length", sizes.hidden),
        ("feed_forward_length", 3 * sizes.hidden), ("attention.head_count", sizes.heads),
        ("attention.head_count_kv", sizes.kv_heads), ("attention.key_length", sizes.head_dim),
        ("attention.value_length", sizes.head_dim), ("expert_count", sizes.experts),
        ("expert_used_count", sizes.top_k), ("expert_feed_forward_length", sizes.width), ("vocab_size", sizes.vocab),
        ("rope.freq_base", 1e6), ("attention.layer_norm_rms_epsilon", 1e-6),
    ):  # fmt: skip
        yield _pair("qwen3moe." + key, number)
    bytes_ = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
    tokens = [*bytes_, "ab", "<|end|>"]
    tokens += [f"[PAD{number}]" for number in range(len(tokens), sizes.vocab)]
    yield _pair("tokenizer.ggml.model", "gpt2")
    yield _pair("tokenizer.ggml.pre", "qwen2")
    yield _pair("tokenizer.ggml.tokens", tokens)
    yield _pair("tokenizer.ggml.token_type", [1] * 257 + [3] + [5] * (sizes.vocab - 258))
    yield _pair("tokenizer.ggml.merges", ["a b"])
    yield _pair("tokenizer.ggml.eos_token_id", 257)
    yield _pair("tokenizer.chat_template", "{{ messages[0].content }}")


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _pair(key: str, value: str | float | list[str] | list[int]) -> bytes:
    if isinstance(value, list):
        words = b"".join(_text(each) if isinstance(each, str) else struct.pack("<i", each) for each in value)
        kind = 8 if isinstance(value[0], str) else 5
        return _text(key) + struct.pack("<IIQ", 9, kind, len(value)) + words
    if isinstance(value, str):
        return _text(key) + struct.pack("<I", 8) + _text(value)
    return _text(key) + (struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value))


def room(folder: Path) -> int:
    """Bytes that a folder's disk has left."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
