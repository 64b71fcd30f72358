"""`kt quality`: what a format, a tier or another checkpoint does to a model's answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tandem.flags.output_files import output_file

Methods = Annotated[
    list[str] | None,
    typer.Option("--format", "--kt-method", help="expert format (default: INT8 and INT4)"),
]
Int8Activations = Annotated[
    bool, typer.Option("--kt-int8-activations", help="each format with int8 activations (A8), too")
]
GpuShares = Annotated[
    list[float] | None,
    typer.Option(
        "--kt-gpu-experts-ratio",
        metavar="SHARE",
        help="of its experts on a GPU, for each format",
    ),
]
Deferred = Annotated[
    int, typer.Option("--late", min=0, metavar="N", help="with N deferred experts of a token, too")
]
LateAsServed = Annotated[
    int, typer.Option("--kt-max-deferred-experts-per-token", min=0, hidden=True)
]  # the server's name of it, too long for the table

LayerKl = Annotated[bool, typer.Option("--layer-kl", help="KL of each layer alone (slow: layers²)")]
KvCacheDtype = Annotated[
    str | None, typer.Option("--kv-cache-dtype", metavar="DTYPE", help="on a GPU with such a KV cache, too")
]


def quality(
    model: Annotated[str, typer.Argument(help="model directory, or demo")],
    method: Methods = None,
    reference: Annotated[str | None, typer.Option(help="checkpoint to compare with (default: MODEL)")] = None,
    reference_logits: Annotated[Path | None, typer.Option(help="compare with logits saved before")] = None,
    save_logits: Annotated[Path | None, typer.Option(help="save the reference's logits", callback=output_file)] = None,
    keep: Annotated[int, typer.Option(min=0, help="logits saved per token, the largest; 0: all")] = 1024,
    text: Annotated[Path | None, typer.Option(help="UTF-8 text (default: one that Tandem has)")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="how many tokens of the text")] = 4096,
    window: Annotated[int, typer.Option(min=2, help="tokens that see each other")] = 512,
    layer_kl: LayerKl = False,
    kt_int8_activations: Int8Activations = False,
    kt_gpu_experts_ratio: GpuShares = None,
    deferred: Deferred = 0,
    kt_max_deferred_experts_per_token: LateAsServed = 0,
    kv_cache_dtype: KvCacheDtype = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32")] = "auto",
    reference_dtype: Annotated[str, typer.Option(help="of the reference")] = "auto",
    kernel_tier: Annotated[str, typer.Option(help="of what is measured")] = "auto",
    kt_cpuinfer: Annotated[
        int | None, typer.Option(min=1, help="worker threads (default: physical cores)")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="write the result as JSON", callback=output_file)] = None,
    plot: Annotated[Path | None, typer.Option(help="draw errors by layer as PNG", callback=output_file)] = None,
) -> None:
    """Perplexity and KL divergence of a format, checkpoint or placement, on a text, against a reference.

    One layer is in memory at a time, so any model fits. The reference is computed on the CPU.
    By layer: "own" is the mean relative error of hidden states if only this layer is measured,
    "total" if all up to it are.

    Example: kt quality demo --format INT4 --out quality.json
    """
    from tandem.cli.quality_run import QualityFlags, run

    run(
        QualityFlags(
            model=model,
            methods=tuple(method or ()),
            reference=reference,
            reference_logits=reference_logits,
            save_logits=save_logits,
            keep=keep,
            text=text,
            tokens=tokens,
            window=window,
            layer_kl=layer_kl,
            int8_activations=kt_int8_activations,
            gpu_shares=tuple(kt_gpu_experts_ratio or ()),
            deferred=deferred or kt_max_deferred_experts_per_token,
            cached=kv_cache_dtype,
            dtype=dtype,
            reference_dtype=reference_dtype,
            tier=kernel_tier,
            threads=kt_cpuinfer,
        ),
        out,
        plot,
    )
