"""Flags that SGLang, KTransformers or vLLM have and Tandem has not: what to do instead of each."""

from __future__ import annotations

_FOUND = "it is found by itself; leave the flag out"
_WEIGHTS = f"how weights are stored is read from the checkpoint; {_FOUND}"
_ONE_MODEL = "one engine process serves the model; leave the flag out"

FOREIGN = {
    "--quantization": f"{_WEIGHTS}. --kt-method converts experts while loading",
    "--load-format": _WEIGHTS,
    "--config": "flags are given on the command line; a model directory is given as MODEL",
    "--tokenizer-path": "the tokenizer is the model directory's; leave the flag out",
    "--tokenizer": "the tokenizer is the model directory's; leave the flag out",
    "--tokenizer-mode": "there is one tokenizer; leave the flag out",
    "--revision": "give it with the name: ORG/NAME@REVISION",
    "--download-dir": "models are kept where the Hugging Face hub keeps them; set HF_HUB_CACHE",
    "--max-model-len": "give --context-length",
    "--max-num-seqs": "give --max-running-requests",
    "--max-num-batched-tokens": "give --chunked-prefill-size",
    "--gpu-memory-utilization": "give --mem-fraction-static",
    "--random-seed": "each request has its own seed",
    "--seed": "each request has its own seed",
    "--data-parallel-size": _ONE_MODEL,
    "--dp-size": _ONE_MODEL,
    "--dp": _ONE_MODEL,
    "--expert-parallel-size": _ONE_MODEL,
    "--ep-size": _ONE_MODEL,
    "--ep": _ONE_MODEL,
    "--enable-p2p-check": _ONE_MODEL,
    "--base-gpu-id": "set CUDA_VISIBLE_DEVICES",
    "--cpu-offload-gb": "experts stay in CPU memory by themselves; --kt-gpu-experts-ratio says how many do not",
    "--enable-metrics": "/metrics is always there; leave the flag out",
    "--enable-torch-compile": "decode steps are CUDA graphs; leave the flag out",
    "--enforce-eager": "give --disable-cuda-graph",
    "--log-requests": "give --log-level debug",
    "--moe-runner-backend": _FOUND,
    "--fp8-gemm-backend": _FOUND,
    "--schedule-policy": "requests are served in their order; leave the flag out",
    "--schedule-conservativeness": "requests are preempted when the KV cache is full; leave the flag out",
}  # fmt: skip
"""What follows "unknown flag --x: "."""
