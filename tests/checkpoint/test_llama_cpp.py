"""The same GGUF files in llama.cpp and here: tokens, logits, greedy text. `make test-peers` installs what is needed.

llama.cpp rounds activations to 8 bits before every product with quantised weights, so logits are close, not equal.
"""

from __future__ import annotations

import ctypes
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM

from gguf_files import finish, write_gguf
from sessions import PAGE_SIZE, Session
from tandem import _core
from tandem.checkpoint.demo_source import base_gguf
from tandem.checkpoint.gguf_tokenizer import COMPOSED, PRE
from tandem.kernels.cpu_ops import CpuOps
from tandem.spec.model_config import STORED
from tandem.text.tokenizer import Tokenizer
from tiny import settings

llama_cpp: Any = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: make test-peers")

TEXT = (Path(__file__).parents[2] / "docs" / "structure.md").read_text(encoding="utf-8")
NEW_TOKENS = 32


# -- logits and greedy text ---


class Peer:
    """A file in llama.cpp."""

    def __init__(self, file: Path) -> None:
        self.llama = llama_cpp.Llama(
            str(file), n_ctx=512, n_batch=512, logits_all=True, n_threads=1, n_threads_batch=1, verbose=False
        )

    def begin(self) -> None:
        self.llama.reset()

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Of these tokens after those since `begin`: float32 [len(ids), vocab]."""
        self.llama.eval(ids)
        end = self.llama.n_tokens
        return torch.from_numpy(np.array(self.llama.scores[end - len(ids) : end], np.float32))


class Here:
    """The same file in our model code over the C++ kernels, as it is served: bfloat16 activations, blocks as codes."""

    def __init__(self, file: Path) -> None:
        self.ops = CpuOps(_core.WorkerPool([-1, -1]), _core.supported_tiers()[-1])
        served = {"expert_format": STORED, "dense_codes": True}
        self.session = Session(file, "bfloat16", ops=self.ops, pages=512 // PAGE_SIZE, **served)

    def begin(self) -> None:
        self.session.lengths = [0, 0, 0]

    def logits(self, ids: list[int]) -> torch.Tensor:
        return self.session.step([(0, ids)])[0]


class Pair:
    """A file in both. `close` [positions of TEXT]: how near two tokens' logits may be for the choice to go either way:
    four standard deviations of the difference of two logits' errors at that position. (A token whose second expert is
    nearly its third is further off than others.)"""

    def __init__(self, file: Path) -> None:
        self.peer, self.here, self.tokenizer = Peer(file), Here(file), Tokenizer.load(file)
        ids = self.tokenizer.encode(TEXT)[:256]
        self.expected, self.found = self.peer.logits(ids), self.here.logits(ids)
        self.divergence = divergence(self.expected, self.found)
        self.close = 4 * 2**0.5 * (self.expected - self.found).std(-1)

    def check_sure_positions(self) -> float:
        """Both choose the same next token wherever llama.cpp's first is far enough ahead; the share of such places."""
        best = self.expected.topk(2)
        sure = best.values[:, 0] - best.values[:, 1] > self.close
        assert torch.equal(best.indices[sure, 0], self.found[sure].argmax(-1))
        return float(sure.float().mean())

    def check_answers(self, prompts: list[list[int]]) -> float:
        """Greedy answers agree up to the first close call; the share of tokens before it."""
        agreeing = 0
        for prompt in prompts:
            (theirs, margins), (found, _) = greedy(self.peer, prompt), greedy(self.here, prompt)
            same = next((i for i in range(NEW_TOKENS) if theirs[i] != found[i]), NEW_TOKENS)
            assert same == NEW_TOKENS or margins[same] < self.close.max(), (
                theirs,
                found,
                margins,
                self.close,
            )
            agreeing += same
        return agreeing / (NEW_TOKENS * len(prompts))


def divergence(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Mean KL(expected || found) over positions, nats."""
    p, q = expected.double().log_softmax(-1), found.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def greedy(engine: Peer | Here, prompt: list[int]) -> tuple[list[int], list[float]]:
    """NEW_TOKENS ids, and by how much each was ahead of the second."""
    engine.begin()
    new, ids, margins = prompt, [], []
    for _ in range(NEW_TOKENS):
        best = engine.logits(new)[-1].topk(2)
        margins.append(float(best.values[0] - best.values[1]))
        new = [int(best.indices[0])]
        ids += new
    return ids, margins


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> Path:
    """The packaged Q4_1 file that the demo model is made from."""
    return base_gguf(tmp_path_factory.mktemp("smollm2"))


PROMPTS = (
    "1, 2, 3, 4, 5, 6, 7, 8,",
    "10, 20, 30, 40, 50, 60,",
    "The cat sat on the mat. The cat sat on the mat. The cat sat on the mat. The cat",
    "January, February, March, April,",
    "def add(a, b):\n    return a + b\n\ndef multiply(a, b):\n    return a * b\n\ndef subtract(a, b):\n    return",
)


def test_smollm2_is_llama_cpps(smollm2):
    pair = Pair(smollm2)
    assert pair.divergence <= 0.01
    assert pair.check_sure_positions() > 0.2
    assert pair.check_answers([pair.tokenizer.encode(text) for text in PROMPTS]) > 0.5


QWEN3 = settings(
    hidden_size=256, num_hidden_layers=2, max_position_embeddings=512, num_experts_per_tok=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, num_experts=8, moe_intermediate_size=256, intermediate_size=512,
    norm_topk_prob=True, initializer_range=0.065,
)  # fmt: skip
FTYPES = {"Q8_0": 7, "Q4_K_M": 15, "Q6_K": 18}  # enum llama_ftype


DEEPSEEK3 = settings(
    hidden_size=256, num_hidden_layers=2, max_position_embeddings=512, num_experts_per_tok=4, num_attention_heads=4,
    num_key_value_heads=4, q_lora_rank=256, kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64,
    n_routed_experts=8, n_shared_experts=1, moe_intermediate_size=256, intermediate_size=512, first_k_dense_replace=1,
    n_group=2, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.5, num_mtp_layers=0, initializer_range=0.065,
    rope_parameters=settings(rope_type="yarn", rope_theta=10000.0, factor=4.0, mscale=1.0, mscale_all_dim=1.0,
                             original_max_position_embeddings=128, beta_fast=32, beta_slow=1),
)  # fmt: skip
DEEPSEEK2 = DEEPSEEK3 | settings(
    topk_method="greedy", n_group=1, topk_group=1, norm_topk_prob=False, q_lora_rank=None,
    rope_parameters=settings(rope_type="default", rope_theta=10000.0),
)  # fmt: skip


def random_model(path: Path, family: str, sizes: dict[str, object], pre: str, **more: Any) -> Path:
    """A random model in F32 with a small trained tokenizer."""
    library = byte_level()
    library.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        '{"bos_token": "<|bos|>", "eos_token": "<|eos|>", "chat_template": "{{ messages[0].content }}"}'
    )
    torch.manual_seed(11)
    config = AutoConfig.for_model(family, vocab_size=library.get_vocab_size(), **sizes)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for layer in model.model.layers:
            if hasattr(
                layer.mlp, "gate"
            ):  # the last chosen expert hardly counts: that it may be another hardly matters
                layer.mlp.gate.weight.mul_(3)
    model.save_pretrained(path)
    return write_gguf(path, path / "f32.gguf", pre=pre, **more)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> Path:
    return random_model(tmp_path_factory.mktemp("qwen3"), "qwen3_moe", QWEN3, "qwen2")


def quantised(file: Path, name: str) -> Path:
    """By llama.cpp's own quantiser."""
    out, parameters = file.with_name(f"{name}.gguf"), llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread = FTYPES[name], 2
    code = llama_cpp.llama_model_quantize(str(file).encode(), str(out).encode(), ctypes.byref(parameters))
    assert code == 0
    return out


@pytest.mark.parametrize("name", FTYPES)
def test_a_random_qwen3_moe_is_llama_cpps(qwen3, name):
    pair = Pair(quantised(qwen3, name))
    assert float(pair.expected.std()) > 1  # two models with nothing in common would be about 1 nat apart
    assert pair.divergence <= 0.01
    assert pair.check_sure_positions() > 0.05
    ids = [pair.tokenizer.encode(text) for text in PROMPTS]
    assert pair.check_answers(ids) > 0  # most choices of a random model are close calls


@pytest.mark.parametrize("whole", [False, True], ids=["divided", "whole"])
@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v2"])
def test_a_random_deepseek_is_llama_cpps(tmp_path, family, whole):
    """Latent attention, YaRN and groups of experts (V3), a query without a latent (V2: llama.cpp knows that by 27
    layers)."""
    sizes = (
        DEEPSEEK3
        if family == "deepseek_v3"
        else DEEPSEEK2 | {"num_hidden_layers": 27, "initializer_range": 0.045}
    )
    pair = Pair(quantised(random_model(tmp_path, family, sizes, "deepseek-v3", whole=whole), "Q8_0"))
    assert pair.divergence <= 0.01
    assert pair.check_sure_positions() > 0.05


# -- tokens ---


@cache
def byte_level() -> Library:
    """A byte-level BPE of 600 tokens, trained on prose of ours."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<|bos|>", "<|eos|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    library.train_from_iterator([TEXT, *CHARACTERS], trainer)
    return library


CHARACTERS = [
    *"abcdXYZ  \n\r\t0123456789'.,!?-/$^~äöüßÉñ東京の한국½²٣😀\u0301",
    "'s",
    "'LL",
    "\r\n",
    "   ",
    " The",
]


def random_texts(count: int) -> list[str]:
    dice = random.Random(5)
    return ["".join(dice.choices(CHARACTERS, k=dice.randint(1, 30))) for _ in range(count)]


def vocabulary_file(path: Path, model: str, tokens: list[str], kinds: list[int], **more: Any) -> Path:
    """A GGUF file of a vocabulary; llama.cpp reads it with `vocab_only`."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if "pre" in more:
        writer.add_tokenizer_pre(more["pre"])
        writer.add_token_merges(more["merges"])
    else:
        writer.add_token_scores(more["scores"])
        writer.add_add_space_prefix(more["prefix"])
    writer.add_bos_token_id(more["bos"])
    writer.add_eos_token_id(more["bos"] + 1)
    writer.add_tensor("output_norm.weight", np.ones(4, np.float32))
    return finish(writer, path)


def differing(file: Path, texts: list[str], begin: bool = False) -> list[tuple[str, list[int], list[int]]]:
    theirs = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
    ours = Tokenizer.load(file)
    pairs = [
        (t, theirs.tokenize(t.encode(), begin, True), ours.encode(t, add_special_tokens=begin)) for t in texts
    ]
    return [pair for pair in pairs if pair[1] != pair[2]]


ACCENT = "\u0301"  # combining
MARKS_APART = (
    "gpt-4o",
    "tekken",
    "pixtral",
    "kimi-k2",
)  # llama.cpp's own patterns for these leave combining marks out of words


@pytest.mark.parametrize("pre", sorted(PRE))
def test_text_is_cut_as_llama_cpp_cuts_it(tmp_path, pre):
    parts = json.loads(byte_level().to_str())
    tokens = sorted(parts["model"]["vocab"], key=parts["model"]["vocab"].get)
    merges = [" ".join(pair) for pair in parts["model"]["merges"]]
    kinds = [3, 3] + [1] * (len(tokens) - 2)
    file = vocabulary_file(tmp_path / "v.gguf", "gpt2", tokens, kinds, pre=pre, merges=merges, bos=0)
    texts = random_texts(1000)
    if pre in (*COMPOSED, *MARKS_APART):
        texts = [text.replace(ACCENT, "") for text in texts]
    assert differing(file, texts) == []
    assert differing(file, ["hello <|eos|> there", "<|bos|>"], begin=True) == []


def test_sentencepiece_text_is_cut_as_llama_cpp_cuts_it(tmp_path):
    """A vocabulary with scores: single characters, bytes, and what a trained BPE merged, best first."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=500, show_progress=False))
    vocabulary = library.get_vocab()
    learnt = sorted(vocabulary, key=vocabulary.__getitem__)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *learnt]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(learnt)
    scores = [0.0] * 259 + [-float(i) for i in range(len(learnt))]
    for prefix in (True, False):
        file = vocabulary_file(
            tmp_path / "v.gguf", "llama", tokens, kinds, scores=scores, bos=1, prefix=prefix
        )
        assert differing(file, random_texts(1000)) == []
        assert differing(file, ["hello</s> there", "The experts are weights."], begin=True) == []
