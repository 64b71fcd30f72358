"""`kt bench`: measurements, each beside what it is compared with, as a table and as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

KERNEL_FORMATS = (
    "bf16, f32, int8, int4, int4-g64, int4-g128, int4-zeros (GPTQ, AWQ), fp8 (128x128 blocks), fp8-row, mxfp4, mxfp8, "
    "nvfp4; GGUF's q4_0, q4_1, q8_0, q4_k, q6_k"
)
bench = typer.Typer(
    help="Measure kernels and decoding on this machine, beside PyTorch and Transformers.\n\n"
    "Example: kt bench kernels",
    no_args_is_help=True,
)


Synthetic = Annotated[
    str | None,
    typer.Option(help="on a GPU, with made-up weights: qwen3-30b-a3b, qwen3-235b-a22b, qwen3-512e"),
]
GpuShare = Annotated[
    list[float] | None, typer.Option(min=0, max=1, help="of the experts, with --config [default: 0, 0.5, 1]")
]
Layers = Annotated[int | None, typer.Option(min=1, help="first layers only, with --config")]
Context = Annotated[int, typer.Option(min=1, help="tokens of every sequence, with --config")]


@bench.command()
def kernels(
    shape: Annotated[
        list[str] | None, typer.Option(help="demo, q3, ds3 or HIDDENxWIDTHxEXPERTSxTOPK [default: demo]")
    ] = None,
    fmt: Annotated[
        list[str] | None, typer.Option("--format", help=KERNEL_FORMATS + " [default: bf16]")
    ] = None,
    tier: Annotated[list[str] | None, typer.Option(help="kernel tier [default: this CPU's best]")] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="tokens per call [default: 1, 8, 64, 512]")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="worker threads [default: usable physical cores]")
    ] = None,
    with_torch: Annotated[
        bool, typer.Option("--torch/--no-torch", help="PyTorch's bf16 loop and grouped_mm beside ours")
    ] = True,
    seconds: Annotated[float, typer.Option(min=0, help="measuring time per row")] = 1.0,
    working_set_mib: Annotated[
        int | None, typer.Option(min=1, help="distinct weights [default: 4 x the last-level cache]")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="write the rows as JSON")] = None,
    plot: Annotated[Path | None, typer.Option(help="draw the roofline as PNG (needs matplotlib)")] = None,
) -> None:
    """Measure the expert kernels against this machine's ceilings, and against PyTorch.

    Options for lists can be repeated. Example: kt bench kernels --format bf16 --format int4 --out kernels.json
    """
    from tandem.cli.bench_kernels import run

    run(
        shapes=shape or ["demo"],
        formats=fmt or ["bf16"],
        tiers=tier or [],
        tokens=tokens or [1, 8, 64, 512],
        threads=threads,
        with_torch=with_torch,
        seconds=seconds,
        working_set_mib=working_set_mib,
        out=out,
        plot=plot,
    )


@bench.command()
def decode(
    model: Annotated[str, typer.Argument(help="model directory, or demo")] = "demo",
    fmt: Annotated[
        list[str] | None, typer.Option("--format", help="expert format: BF16, INT8 or INT4 [default: BF16]")
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="sequences decoded together [default: 1, 8]")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="decode steps per repeat")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="repeats; the median counts")] = 5,
    threads: Annotated[
        int | None, typer.Option(min=1, help="worker threads [default: usable physical cores]")
    ] = None,
    tier: Annotated[str, typer.Option(help="kernel tier")] = "auto",
    transformers: Annotated[
        bool, typer.Option("--transformers", help="Transformers' generate beside ours")
    ] = False,
    llama_cpp: Annotated[
        bool, typer.Option("--llama-cpp", help="llama-cpp-python on the dense base model beside ours")
    ] = False,
    config: Synthetic = None,
    gpu_share: GpuShare = None,
    layers: Layers = None,
    context: Context = 1024,
    out: Annotated[Path | None, typer.Option(help="write the rows as JSON")] = None,
) -> None:
    """Measure decoding against the memory-bandwidth bound of the same run, and against other engines.

    Example: kt bench decode --transformers --out decode.json
    """
    if config is not None:
        from tandem.cli import bench_hybrid

        shares = tuple(gpu_share or [0.0, 0.5, 1.0])
        asked = (config, tuple(fmt or ["BF16"]), shares, tuple(batch or [1, 8]), layers, context)
        bench_hybrid.run(bench_hybrid.Request(*asked, steps, repeats, threads, tier), out)
        return
    from tandem.cli.bench_decode import Request, run

    request = Request(
        model=model,
        formats=tuple(fmt or ["BF16"]),
        batches=tuple(batch or [1, 8]),
        steps=steps,
        repeats=repeats,
        transformers=transformers,
        llama_cpp=llama_cpp,
        threads=threads,
        tier=tier,
    )
    run(request, out)
