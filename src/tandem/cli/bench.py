"""`kt bench`: measurements, each beside what it is compared with, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from tandem.bench.architectures import NAMES
from tandem.cli.other_names import CommandGroup
from tandem.errors import ConfigError
from tandem.flags.idle_in_bench import check_decode, check_explained, check_serve
from tandem.flags.output_files import output_file, output_place
from tandem.planner.choices.speculation import check_algorithm, default_draft_tokens

KERNEL_FORMATS = (
    "bf16, f32, int8, int4, int4-g64, int4-g128, int4-zeros (GPTQ, AWQ), fp8 (128x128 blocks), fp8-row, mxfp4, mxfp8, "
    "nvfp4; GGUF's q4_0, q4_1, q8_0, q2_k to q6_k, iq1_s to iq4_xs"
)
bench = typer.Typer(
    cls=CommandGroup,
    help="Measure this machine: kernels, decoding, prompts, a server under load, and where experts live.\n\n"
    "Example: kt bench decode",
    no_args_is_help=True,
)


Synthetic = Annotated[
    str | None,
    typer.Option(help="made-up weights, on a GPU, or on a CPU with --speculative: " + NAMES),
]
MadeUp = Annotated[str | None, typer.Option(help="with --long-prompt: made-up weights of " + NAMES)]
OutputLength = Annotated[
    int | None, typer.Option(min=1, help="tokens, on average (default: 64; with --long-prompt 1024)")
]
GpuShare = Annotated[
    list[float] | None, typer.Option(min=0, max=1, help="of the experts, with --config (default: 0, 0.5, 1)")
]
Lengths = Annotated[int, typer.Option(min=1, help="tokens, on average")]
Layers = Annotated[int | None, typer.Option(min=1, help="first layers only, with --config")]
Out = Annotated[
    Path | None,
    typer.Option(help="write the rows as JSON; a directory keeps them by machine and bench", callback=output_place),
]
Plot = Annotated[Path | None, typer.Option(help="draw as PNG (needs matplotlib)", callback=output_file)]
LongPlot = Annotated[
    Path | None, typer.Option(help="with --long-prompt: draw as PNG (matplotlib)", callback=output_file)
]
Context = Annotated[int, typer.Option(min=1, help="tokens of every sequence, with --config")]

DecodeFormats = Annotated[
    list[str] | None,
    typer.Option(
        "--format", help="of experts (default: as stored; with --config BF16): BF16, INT8, INT4; there also FP8, MXFP4"
    ),
]
DecodeBatches = Annotated[list[int] | None, typer.Option(min=1, help="sequences decoded together (default: 1, 8)")]
BesideTransformers = Annotated[bool, typer.Option("--transformers", help="Transformers' generate beside ours")]
BesideLlamaCpp = Annotated[
    bool, typer.Option("--llama-cpp", help="llama-cpp-python on the dense base model beside ours")
]
DenseFormat = Annotated[str, typer.Option(help="with --config: dense matrices are bf16, fp8, int4-g128 or mxfp4")]
ExplainSteps = Annotated[bool, typer.Option("--explain", help="say which path each step takes, and measure nothing")]
Int8Activations = Annotated[
    bool, typer.Option("--kt-int8-activations", help="with int8 activations in experts on the CPU (lossy)")
]
Deterministic = Annotated[bool, typer.Option("--deterministic", help="with --enable-deterministic-inference")]
Speculative = Annotated[
    str | None, typer.Option(help="with draft tokens and without, in turn: NGRAM, NEXTN")
]
MostDraftTokens = Annotated[
    int | None,
    typer.Option(
        "--speculative-num-steps", min=1, max=63,
        help="most draft tokens of a sequence in a step (7, NEXTN: 3, DSPARK: 5)",
    ),
]  # fmt: skip
Acceptances = Annotated[
    list[float] | None, typer.Option(min=0, max=1, help="with --speculative: so many draft tokens are accepted")
]
Governed = Annotated[
    bool, typer.Option("--governor/--no-governor", help="with --speculative: as many draft tokens as pay")
]


def explain_steps() -> ModuleType:
    """It imports the engine, which `kt --help` need not."""
    from tandem.bench import explain_steps as module

    return module


@bench.command()
def kernels(
    invocation: typer.Context,
    shape: Annotated[
        list[str] | None, typer.Option(help="demo, q3, ds3 or HIDDENxWIDTHxEXPERTSxTOPK (default: demo)")
    ] = None,
    fmt: Annotated[list[str] | None, typer.Option("--format", help=KERNEL_FORMATS + " (default: bf16)")] = None,
    tier: Annotated[list[str] | None, typer.Option(help="kernel tier (default: this CPU's best)")] = None,
    tokens: Annotated[list[int] | None, typer.Option(min=1, help="tokens per call (default: 1, 8, 64, 512)")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="worker threads (default: usable physical cores)")] = None,
    with_torch: Annotated[
        bool, typer.Option("--torch/--no-torch", help="PyTorch's bf16 loop and grouped_mm beside ours")
    ] = True,
    int8_activations: Annotated[
        bool, typer.Option("--int8-activations", help="ours with int8 activations (lossy), too: A8")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="say which kernel each row runs on, and measure nothing")
    ] = False,
    seconds: Annotated[float, typer.Option(min=0, help="measuring time per row")] = 1.0,
    working_set_mib: Annotated[
        int | None, typer.Option(min=1, help="distinct weights (default: 4 x the last-level cache)")
    ] = None,
    out: Out = None,
    plot: Plot = None,
) -> None:
    """Measure the expert kernels against this machine's ceilings, and against PyTorch.

    Options for lists can be repeated. Example: kt bench kernels --format bf16 --format int4 --out kernels.json
    """
    check_explained(invocation)
    from tandem.bench.kernels import run as measured

    shared: dict[str, Any] = {
        "shapes": shape or ["demo"], "formats": fmt or ["bf16"], "tiers": tier or [],
        "tokens": tokens or [1, 8, 64, 512],
    }  # fmt: skip
    if explain:
        measured.explain(**shared)
        return
    measures = measured.TypedFlags(
        **shared, with_torch=with_torch, int8_activations=int8_activations, seconds=seconds,
        working_set_mib=working_set_mib,
    )  # fmt: skip
    measured.run(measures, threads, out, plot)


def _check_int8_activations(beside_others: bool) -> None:
    if beside_others:
        raise ConfigError("--kt-int8-activations is of a model's files: leave out --config, --speculative, --explain")


@bench.command()
def decode(
    invocation: typer.Context,
    model: Annotated[str, typer.Argument(help="model directory, GGUF file, or demo")] = "demo",
    fmt: DecodeFormats = None,
    batch: DecodeBatches = None,
    steps: Annotated[int, typer.Option(min=1, help="decode steps per repeat")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="repeats; the median counts")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="worker threads (default: usable physical cores)")] = None,
    tier: Annotated[str, typer.Option(help="kernel tier")] = "auto",
    transformers: BesideTransformers = False,
    llama_cpp: BesideLlamaCpp = False,
    config: Synthetic = None,
    gpu_share: GpuShare = None,
    layers: Layers = None,
    context: Context = 1024,
    dense_format: DenseFormat = "bf16",
    foresight: Annotated[str, typer.Option(help="with --config: expert foresight on, off, or both in turn")] = "on",
    deterministic: Deterministic = False,
    kt_int8_activations: Int8Activations = False,
    speculative: Speculative = None,
    num_steps: MostDraftTokens = None,
    acceptance: Acceptances = None,
    governor: Governed = True,
    explain: ExplainSteps = False,
    out: Out = None,
) -> None:
    """Measure decoding against the memory-bandwidth bound of the same run, and against other engines.

    Example: kt bench decode --transformers --out decode.json
    """
    if acceptance is not None and speculative is None:
        raise ConfigError("--acceptance says nothing alone: give --speculative NGRAM, too")
    _check_int8_activations(kt_int8_activations and bool(config or speculative or explain))
    check_decode(invocation)
    if explain:
        explain_steps().decode(config, fmt, gpu_share, batch, layers)
        return
    if config is not None and speculative is None:
        from tandem.bench import hybrid as bench_hybrid

        shares = tuple(gpu_share or [0.0, 0.5, 1.0])
        arguments = (config, tuple(fmt or ["BF16"]), shares, tuple(batch or [1, 8]), layers, context, steps, repeats)
        more = (threads, tier, dense_format, bench_hybrid.foresight_modes(foresight))
        bench_hybrid.run(bench_hybrid.HybridFlags(*arguments, *more), out)
        return
    if speculative is not None:
        from tandem.bench import speculation as bench_speculation

        formats = tuple(fmt or ["BF16" if config else None])
        base = (model, formats, tuple(batch or [1]), steps, repeats, threads, tier)
        drafts = (name := check_algorithm(speculative), num_steps or default_draft_tokens(name), governor)
        bench_speculation.run(
            bench_speculation.SpeculationFlags(*base, *drafts, tuple(acceptance or ()), config, layers), out
        )
        return
    from tandem.bench.decode import DecodeFlags, run

    what = (model, tuple(fmt or [None]), tuple(batch or [1, 8]), steps, repeats, transformers, llama_cpp)
    run(DecodeFlags(*what, threads, tier, deterministic, kt_int8_activations), out)


@bench.command()
def prefill(
    invocation: typer.Context,
    config: Annotated[str, typer.Option(help="dimensions, with made-up weights: " + NAMES)] = "qwen3-30b-a3b",
    fmt: Annotated[
        list[str] | None, typer.Option("--format", help="of experts: BF16, INT8, INT4, FP8, MXFP4 (default: INT4)")
    ] = None,
    gpu_share: GpuShare = None,
    tokens: Annotated[list[int] | None, typer.Option(min=1, help="of a prompt (default: 512, 2048, 8192)")] = None,
    layers: Layers = None,
    chunk: Annotated[int, typer.Option(min=1, help="tokens of a step at most")] = 8192,
    threshold: Annotated[
        int | None,
        typer.Option(min=0, help="rows from which a step brings the CPU's experts (default: where that is faster)"),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="prompts per row; the median counts")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="worker threads (default: usable physical cores)")] = None,
    tier: Annotated[str, typer.Option(help="kernel tier")] = "auto",
    cached: Annotated[int, typer.Option(min=0, help="tokens before the prompt, which are cached")] = 0,
    way: Annotated[
        list[str] | None,
        typer.Option(help="experts in CPU memory: auto (default), cpu or bus alone, live (they move); several in turn"),
    ] = None,
    explain: ExplainSteps = False,
    out: Annotated[Path | None, typer.Option(help="write the rows as JSON", callback=output_place)] = None,
) -> None:
    """Measure prompts on a GPU against what bus, CPU and GPU allow together.

    Example: kt bench prefill --gpu-share 0 --tokens 2048 --out prefill.json
    """
    check_explained(invocation)
    if explain:
        explain_steps().prefill(config, fmt, gpu_share, tokens, layers)
        return
    from tandem.bench.prefill import PrefillFlags, run

    lists = (tuple(fmt or ["INT4"]), tuple(gpu_share or [0.0, 0.5, 1.0]), tuple(tokens or [512, 2048, 8192]))
    ways = tuple(dict.fromkeys(way or ["auto"]))
    run(PrefillFlags(config, *lists, layers, chunk, threshold, repeats, threads, tier, cached, ways), out)


@bench.command()
def serve(
    invocation: typer.Context,
    model: Annotated[str, typer.Argument(help="model directory, GGUF file, or demo, served for the time")] = "demo",
    url: Annotated[
        str | None,
        typer.Option(help="measure this running server instead; any with OpenAI's completions API"),
    ] = None,
    concurrency: Annotated[list[int] | None, typer.Option(min=1, help="requests in flight (default: 1, 8)")] = None,
    rate: Annotated[
        list[float] | None, typer.Option(min=0.001, help="requests per second at random times instead")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="requests per row")] = 32,
    input_len: Lengths = 256,
    output_len: OutputLength = None,
    spread: Annotated[float, typer.Option(min=0, max=1, help="0.5: lengths vary by half both ways")] = 0.0,
    shared_prefix: Annotated[int, typer.Option(min=0, help="first tokens that all prompts share")] = 0,
    seed: Annotated[int, typer.Option(help="of prompts, lengths and times")] = 0,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON of conversations (ShareGPT's form): their first questions instead")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="if the server wants one; or TANDEM_API_KEY")] = None,
    flag: Annotated[list[str] | None, typer.Option(help="for kt serve, as --flag='--kt-method INT4'")] = None,
    long_prompt: Annotated[
        int | None,
        typer.Option(min=1, help="tokens: instead, how long readers wait alone and beside such prompts"),
    ] = None,
    gaps: Annotated[int, typer.Option(min=1, help="with --long-prompt: waits to see of each kind")] = 500,
    seconds: Annotated[float, typer.Option(min=1, help="... but not for longer than that, each")] = 120.0,
    config: MadeUp = None,
    layers: Layers = None,
    out: Out = None,
    plot: LongPlot = None,
) -> None:
    """Measure a server under load: throughput, time to the first token, time per token.

    Example: kt bench serve demo --concurrency 1 --concurrency 8 --out serve.json

    Example: kt bench serve demo --long-prompt 4000 --plot gaps.png
    """
    check_serve(invocation)
    from tandem.flags import env

    flags = tuple(word for text in flag or () for word in shlex.split(text))
    if long_prompt is not None:
        from tandem.bench.gaps import readers, rows

        reading = readers.GapLoad(
            long_prompt, (concurrency or [1])[0], input_len, output_len or 1024, gaps, seconds=seconds, seed=seed
        )
        key = api_key or env.api_key()
        return rows.run(rows.GapFlags(model, url, config, layers, reading, key, flags), out, plot)
    from tandem.bench.load_client import LoadShape
    from tandem.bench.prompt_file import read_prompts
    from tandem.bench.serve import LoadFlags, run

    texts = () if prompts is None else read_prompts(prompts, output_len)
    load = LoadShape(
        requests, input_len, output_len or 64, spread=spread, shared_prefix=shared_prefix, seed=seed, texts=texts
    )
    loads = [dataclasses.replace(load, rate=each) for each in rate or ()]
    in_flight = concurrency or ([] if rate else [1, 8])
    loads += [dataclasses.replace(load, concurrency=each) for each in in_flight]
    run(LoadFlags(model, url, tuple(loads), api_key or env.api_key(), flags), out)


@bench.command()
def experts(
    config: Annotated[str, typer.Option(help="dimensions: " + NAMES)] = "qwen3-512e",
    routing: Annotated[
        str,
        typer.Option(
            help="zipf (drifts), mild (less skew), steady (and less drift), uniform, adversarial (shuffled), or a file"
        ),
    ] = "zipf",
    shares: Annotated[
        str, typer.Option(help="of the experts on the GPU, percent")
    ] = "0,10,20,30,40,50,60,70,80,90,100",
    strategies: Annotated[
        str, typer.Option(help="of random, uniform, front-loading, frequency and dynamic (starts as uniform)")
    ] = "random,uniform,front-loading,frequency,dynamic",
    fmt: Annotated[str, typer.Option("--format", help="expert format: BF16, INT8, INT4, FP8 or MXFP4")] = "INT4",
    simulate: Annotated[
        bool, typer.Option("--simulate", help="cost model instead of a GPU; without a GPU always")
    ] = False,
    tokens: Annotated[int, typer.Option(min=1, help="decoded per row, one per step")] = 1000,
    layers: Layers = None,
    context: Context = 1024,
    seed: Annotated[int, typer.Option(min=0, help="of the requests")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="worker threads (default: usable physical cores)")] = None,
    tier: Annotated[str, typer.Option(help="kernel tier")] = "auto",
    dram_gbps: Annotated[float, typer.Option(min=1, help="cost model: CPU memory")] = 130.0,
    pcie_gbps: Annotated[float, typer.Option(min=1, help="cost model: PCIe")] = 55.0,
    hbm_gbps: Annotated[float, typer.Option(min=1, help="cost model: experts in GPU memory")] = 2150.0,
    gpu_step_ms: Annotated[
        float | None, typer.Option(min=0, help="cost model: a GPU step without experts (default: estimated)")
    ] = None,
    out: Out = None,
    plot: Plot = None,
) -> None:
    """Compare where experts live: tokens per second by share on the GPU and by strategy.

    Example: kt bench experts --config qwen3-512e --shares 0,10,50,100 --simulate --plot experts.png
    """
    from tandem.bench.placement import request as placement_request
    from tandem.bench.placement import simulated as bench_placement

    request = placement_request.PlacementFlags(
        config, routing, placement_request.numbers(shares), tuple(strategies.split(",")), fmt.upper(), layers, tokens,
        seed, context, threads, tier, dram_gbps, pcie_gbps, hbm_gbps, gpu_step_ms,
    )  # fmt: skip
    bench_placement.run(request, simulate, out, plot)


@bench.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    options_metavar="[MODEL] [OPTIONS] [FLAGS OF kt serve]",
)
def report(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="the file", callback=output_file)] = Path("tandem-report.json"),
) -> None:
    """Write one JSON to send with a question: this machine, the plan for MODEL (default: demo), predicted and measured
    speeds. Flags of kt serve are taken; no user, host or path is named.

    Example: kt bench report Qwen/Qwen3-30B-A3B --kt-method INT4
    """
    from tandem.bench.report import lines, write
    from tandem.flags.engine_config import EngineConfig

    named = any(not word.startswith("-") for word in context.args[:1])
    argv = context.args if named else ["demo", *context.args]
    for line in lines(write(EngineConfig.from_args(argv), out)):
        typer.echo(line)


@bench.command()
def compare(
    files: Annotated[list[Path], typer.Argument(metavar="A.json B.json …", help="what kt bench report wrote")],
) -> None:
    """Show reports of several machines or settings as one table, each beside the first.

    Example: kt bench compare mine.json theirs.json
    """
    from rich.console import Console

    from tandem.bench.compare import read, table

    Console().print(table([read(file) for file in files], [file.name for file in files]))
