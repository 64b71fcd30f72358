"""Other engines on the same machine, for `kt bench decode`: imported only when asked for."""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from tandem.errors import ConfigError

TRANSFORMERS_TOKENS = 8  # it decodes about two tokens a second


def transformers_rate(directory: Path, batch: int, prompt_tokens: int, threads: int) -> float:
    """Tokens/s of Transformers' `generate` in bfloat16: the time of 1 token is taken off, which is mostly prefill."""
    transformers = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    ours = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
        prompts = torch.randint(0, model.config.vocab_size, (batch, prompt_tokens))
        _generate(model, prompts, 1)
        short, long = _generate(model, prompts, 1), _generate(model, prompts, 1 + TRANSFORMERS_TOKENS)
        return batch * TRANSFORMERS_TOKENS / (long - short)
    finally:
        torch.set_num_threads(ours)


def _generate(model: Any, prompts: torch.Tensor, tokens: int) -> float:
    started = perf_counter()
    with torch.inference_mode():
        model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
        )
    return perf_counter() - started


def llama_cpp_rate(prompt_tokens: int, steps: int, threads: int) -> float:
    """Tokens/s of llama-cpp-python on the demo model's dense base (SmolLM2-135M-Instruct, Q4_1), batch 1."""
    llama_cpp = importlib.import_module("llama_cpp")
    from tandem.checkpoint.demo_source import base_gguf

    with tempfile.TemporaryDirectory() as scratch:
        model = llama_cpp.Llama(
            str(base_gguf(Path(scratch))),
            n_ctx=1024,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )
        model.eval(list(range(100, 100 + prompt_tokens)))
        started = perf_counter()
        for _ in range(steps):
            model.eval([int(model.sample(temp=0.0))])
        return steps / (perf_counter() - started)


def check_installed(module: str, flag: str) -> None:
    """Before anything is measured: ConfigError if a peer that was asked for is missing."""
    if importlib.util.find_spec(module) is None:
        package = module.replace("llama_cpp", "llama-cpp-python")
        raise ConfigError(f"{flag} needs {package}: pip install {package}, or leave the flag out")
