"""An engine of `vllm_plugin.py` in a process of its own: vLLM with Tandem's experts, vLLM alone, or Tandem.

    python vllm_engines.py vllm '{"model": "FOLDER", "attention": "TRITON_ATTN", "tandem": {"kt_method": "INT4"}}'

Requests are lines of JSON on standard input, answers are lines "ANSWER {...}". All decode in the same way: prompts are
computed, some steps warm up, and the tokens of those that follow are counted.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

PROMPT, WARM, CONTEXT = 32, 8, 1024  # tokens of a prompt; steps before the timed ones; longest sequence
ATTENTION_TOLERANCE = 0.02  # of a mean of bfloat16 numbers of size 1
Step = Callable[[], list[tuple[str, int]]]
"""One step of an engine: names of sequences, and how many tokens each has got."""


def prompts(batch: int, vocab: int) -> Iterator[list[int]]:
    return ([(7919 * (i * PROMPT + j) + 13) % vocab for j in range(PROMPT)] for i in range(batch))


def tokens_per_second(step: Step, batch: int, steps: int) -> float:
    """Decoding rate of `batch` sequences that wait already."""
    begun = set[str]()
    while len(begun) < batch:
        begun.update(name for name, tokens in step() if tokens)
    count_tokens(step, batch * WARM)
    started = perf_counter()
    return count_tokens(step, batch * steps) / (perf_counter() - started)


def count_tokens(step: Step, least: int) -> int:
    tokens = 0
    while tokens < least:
        tokens += sum(number for _, number in step())
    return tokens


class VllmEngine:
    """Its core is a process of its own, as in `vllm serve`."""

    def __init__(self, model: str, attention: str, batches: Sequence[int], tandem: dict[str, Any] | None) -> None:
        """attention: vLLM's backend; "": a CPU, without graphs. tandem: the plug-in's options; None: vLLM's own
        experts."""
        import vllm_worker
        from vllm import LLM

        self._rpc, self._names = vllm_worker, count()
        self._vocab = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
        most = max(batches)
        self._llm = LLM(
            model, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=CONTEXT,
            max_num_seqs=most, max_num_batched_tokens=2048, enable_prefix_caching=False, seed=0,
            kv_cache_memory_bytes=kv_bytes(model, most), gpu_memory_utilization=0.5,
            additional_config={} if tandem is None else {"tandem": tandem}, **graph_options(attention, batches),
        )  # fmt: skip

    def decode(self, batch: int, steps: int, graphs: str = "full", cpu: int | None = None) -> dict[str, Any]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._llm.collective_rpc(self._rpc.choose, args=(graphs, cpu))
        (before,) = self._llm.collective_rpc(self._rpc.observed)
        asked = SamplingParams(
            temperature=0, max_tokens=CONTEXT - PROMPT - 1, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        engine, names = self._llm.llm_engine, [str(next(self._names)) for _ in range(batch)]
        for name, ids in zip(names, prompts(batch, self._vocab), strict=True):
            engine.add_request(name, {"prompt_token_ids": ids}, asked)
        rate = tokens_per_second(
            lambda: [(each.request_id, len(each.outputs[0].token_ids)) for each in engine.step()], batch, steps
        )
        (after,) = self._llm.collective_rpc(self._rpc.observed)
        engine.abort_request(names)
        while engine.has_unfinished_requests():
            engine.step()
        return {"tok_s": rate, "replayed": after["replayed"], "cpu_experts": experts_of_post(before, after)}

    def handoff(self) -> dict[str, Any]:
        """Last: it records a graph of its own."""
        (us,) = self._llm.collective_rpc(self._rpc.handoff_us)
        return {"us": us}


def kv_bytes(model: str, batch: int) -> int:
    """Room for `batch` sequences half as long as they may be."""
    keys = json.loads((Path(model) / "config.json").read_text())
    token = keys["num_hidden_layers"] * keys["num_key_value_heads"] * keys["head_dim"] * 2 * 2
    return int(max(batch, 2) * CONTEXT // 2 * token)


def graph_options(attention: str, batches: Sequence[int]) -> dict[str, Any]:
    """Graphs of both kinds are recorded; `choose` says which are replayed."""
    if not attention:
        return {"enforce_eager": True}
    graphs = {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": sorted(batches)}
    return {"attention_backend": attention, "compilation_config": graphs}


def experts_of_post(before: dict[str, Any], after: dict[str, Any]) -> float | None:
    """That the CPU computed for a layer, a step; None: there were no posts."""
    posts = after["posts"] - before["posts"]
    return round((after["experts"] - before["experts"]) / posts, 2) if posts else None


class KtEngine:
    """Tandem's engine, as `kt serve` has it in its process."""

    def __init__(self, model: str, flags: list[str], batches: Sequence[int]) -> None:
        from tandem.bench.gaps.made_up import made_up_parts
        from tandem.bench.synthetic import FAR
        from tandem.engine.engine import Engine
        from tandem.flags.engine_config import EngineConfig
        from tandem.server.engine_process import take_cpus

        most = max(batches)
        usual = ["--model", model, "--context-length", str(CONTEXT), "--max-running-requests", str(most)]
        usual += ["--max-total-tokens", str(max(most, 4) * CONTEXT // 2), "--disable-radix-cache"]
        parts = made_up_parts(EngineConfig.from_args([*usual, *flags]), embedded=FAR)
        self._vocab, self._names, self._handoff = parts.model_config.vocab, count(), parts.handoff
        self._engine = Engine.from_parts(parts)
        take_cpus(parts)

    def decode(self, batch: int, steps: int) -> dict[str, Any]:
        from tandem.engine.protocol import GenerateRequest, SamplingSettings

        engine, before = self._engine, self._used()
        asked = SamplingSettings(temperature=0.0, ignore_eos=True)
        for ids in prompts(batch, self._vocab):
            engine.add(GenerateRequest(id=str(next(self._names)), prompt_ids=ids, sampling=asked))
        rate = tokens_per_second(lambda: [(each.id, len(each.token_ids)) for each in engine.step()], batch, steps)
        after = self._used()
        engine.abort("")
        while engine.has_work():
            engine.step()
        return {"tok_s": rate, "cpu_experts": experts_of_post(before, after)}

    def _used(self) -> dict[str, int]:
        posts, experts = self._handoff.used() if self._handoff is not None else (0, 0)
        return {"posts": posts, "experts": experts}


class Attention:
    """A check that vLLM's FlashAttention 3 computes here what it should: a carried build may lack it."""

    def decode(self) -> dict[str, Any]:
        try:
            error = attention_error()
        except Exception:
            return {"backend": "TRITON_ATTN", "why": traceback.format_exc()[-300:]}
        return {"backend": "FLASH_ATTN" if error < ATTENTION_TOLERANCE else "TRITON_ATTN", "error": error}


def attention_error() -> float:
    """Largest difference of paged attention of one row, by FlashAttention 3 and by plain operations."""
    import torch
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    rows, heads, kv_heads, size, page, length = 4, 32, 4, 128, 16, 100
    pages = -(-length // page)
    q = torch.randn(rows, heads, size, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(rows * pages, page, kv_heads, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    table = torch.arange(rows * pages, device="cuda", dtype=torch.int32).view(rows, pages)
    lengths = torch.full((rows,), length, device="cuda", dtype=torch.int32)
    starts = torch.arange(rows + 1, device="cuda", dtype=torch.int32)
    plan = get_scheduler_metadata(
        rows, 1, length, heads, kv_heads, size, lengths, cu_seqlens_q=starts, page_size=page, causal=True, num_splits=32
    )
    out = flash_attn_varlen_func(
        q, k, v, 1, starts, length, seqused_k=lengths, softmax_scale=size**-0.5, causal=True, block_table=table,
        scheduler_metadata=plan, num_splits=32, fa_version=3,
    )  # fmt: skip
    whole = [each.view(rows, pages * page, kv_heads, size)[:, :length].transpose(1, 2).float() for each in (k, v)]
    whole = [each.repeat_interleave(heads // kv_heads, 1) for each in whole]
    scores = torch.softmax(q.float()[:, :, None] @ whole[0].mT * size**-0.5, -1)
    return float((out.float() - (scores @ whole[1])[:, :, 0]).abs().max())


KINDS: dict[str, Callable[..., Any]] = {"vllm": VllmEngine, "kt": KtEngine, "attention": Attention}


def main() -> None:
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions are sent to the worker
    started = perf_counter()
    engine = KINDS[sys.argv[1]](**json.loads(sys.argv[2]))
    answer({"ready": round(perf_counter() - started, 1)})
    for line in sys.stdin:
        name, named = json.loads(line)
        try:
            answer(getattr(engine, name)(**named))
        except Exception as error:
            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}"[:400]})


def answer(what: dict[str, Any]) -> None:
    print("ANSWER", json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
