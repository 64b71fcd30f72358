"""Decode speed of a small random DeepSeek-V2 or V3 (latent attention) on the CPU, with and without recorded steps.

    PYTHONPATH=src python benchmarks/decode_latent.py /dev/shm/latent --layers 16

Writes the model into the directory, decodes one sequence (greedy, `--tokens` of them, after a first answer that is
not timed) in turn with recorded steps and without, and removes it. Heads are DeepSeek's own; the hidden size and the
experts are small, so that what lies between the matrices is a large part of a step.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from random_model import save_tokenizer
from tandem import LLM, SamplingParams
from tandem.machine.machine import Machine
from tandem.models import model as decoder


def save(path: Path, layers: int, hidden: int) -> None:
    config = AutoConfig.for_model(
        "deepseek_v3", hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=16,
        q_lora_rank=hidden // 2, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        vocab_size=4096, n_routed_experts=32, n_shared_experts=1, num_experts_per_tok=6, moe_intermediate_size=256,
        intermediate_size=2048, first_k_dense_replace=1, n_group=1, topk_group=1, max_position_embeddings=2048,
    )  # fmt: skip
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    save_tokenizer(path)


def tokens_per_second(llm: LLM, tokens: int) -> float:
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    start = time.perf_counter()
    llm.generate([[1, 2, 3, 4]], sampling)
    return tokens / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=5)
    asked = parser.parse_args()
    save(asked.directory, asked.layers, asked.hidden)
    try:
        llm = LLM(str(asked.directory), max_total_tokens=1024)
        rows, found = decoder.RECORDED_ROWS, {"recorded": [], "not recorded": []}
        tokens_per_second(llm, 16)
        for _ in range(asked.repeat):
            for name, limit in (("recorded", rows), ("not recorded", 0)):
                decoder.RECORDED_ROWS = limit
                found[name].append(round(tokens_per_second(llm, asked.tokens), 1))
    finally:
        shutil.rmtree(asked.directory)
    machine = Machine.detect()
    print(json.dumps({"machine": machine.cpu_model, "threads": machine.max_threads, "layers": asked.layers,
                      "hidden": asked.hidden,
                      "tokens_per_second": found}))  # fmt: skip


if __name__ == "__main__":
    main()
