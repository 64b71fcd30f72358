"""`kt plan`: does a model fit a machine, how fast will it be, and what to change: from its configuration alone."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tandem.bench.probes import MachineProbe
    from tandem.bench.sample import Verified
    from tandem.engine.start.model_files import Inspected
    from tandem.flags.engine_config import EngineConfig
    from tandem.machine.machine import Machine
    from tandem.planner.forecast.advice import PlanQuestion
    from tandem.planner.forecast.machine_spec import MachineWish
    from tandem.planner.forecast.report import ForecastSizes
    from tandem.planner.forecast.speeds import Speeds
    from tandem.spec.model_config import ModelConfig
    from tandem.spec.stored import StoredFormats

Subject = tuple["ModelConfig", "StoredFormats"]
Files = list[tuple[str, int, Subject]]
NAMES = "deepseek-v3, kimi-k2, qwen3.5-35b-a3b, qwen3-30b-a3b-fp8, glm-4.5-air, …"

ConfigName = Annotated[
    str | None, typer.Option("--config", help=f"A named architecture instead of MODEL: {NAMES}")
]
Gpu = Annotated[
    str | None, typer.Option(help='"4090", "24GB", "24GB@1000GB/s", two: "2x4090", or "none".')
]
Ram = Annotated[str | None, typer.Option(help="Of the machine: 256GB.")]
Bandwidth = Annotated[str | None, typer.Option(help="Reading RAM with all cores: 80GB/s.")]
Cpu = Annotated[int | None, typer.Option(help="Physical cores.")]
Isa = Annotated[str | None, typer.Option(help="scalar, avx2, avx512, avx512_bf16 or amx.")]
Pcie = Annotated[str | None, typer.Option(help="From RAM to the GPU: 25GB/s.")]
Prompt = Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")]
Compare = Annotated[bool, typer.Option("--compare", help="Formats x shares of experts on the GPU, ranked.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Verify = Annotated[bool, typer.Option("--verify", help="Measure this machine and some layers, at most 30 s.")]


def plan(
    context: typer.Context,
    config: ConfigName = None,
    gpu: Gpu = None,
    ram: Ram = None,
    bandwidth: Bandwidth = None,
    cpu: Cpu = None,
    isa: Isa = None,
    pcie: Pcie = None,
    tokens: Annotated[
        int, typer.Option("--context", min=1, help="Tokens that a decoding sequence has.")
    ] = 1024,
    prompt: Prompt = 2048,
    compare: Compare = False,
    as_json: Json = False,
    verify: Verify = False,
) -> None:
    """Does MODEL fit, how fast will it be, and what to change: before anything is loaded or fetched.

    MODEL is a directory (config.json is enough), a GGUF file or a name of the hub; several GGUF files are compared.
    All flags of kt serve are taken. What is not said of the machine is as on this one, and a line names it.

    Example: kt plan deepseek-ai/DeepSeek-V3 --gpu 4090 --ram 256GB
    """
    from tandem.cli.serve import tell_at_once

    tell_at_once("looking at the model and this machine …")
    from tandem.cli.plan_text import show
    from tandem.engine.start.planning import check_statistics
    from tandem.planner.forecast.advice import PlanQuestion
    from tandem.planner.forecast.compare import compare as compared
    from tandem.planner.forecast.machine_spec import MachineWish, assumed_text, wished_machine, wished_speeds
    from tandem.planner.forecast.report import ForecastSizes, report

    wish = MachineWish(gpu, ram, bandwidth, cpu, isa, pcie)
    _check_here(wish, verify)
    engine_config, refused = _config(context.args, config, one_gpu=verify)
    several, (model, stored) = _subjects(engine_config, config)  # before anything is measured: there may be none
    here = _this_machine()
    machine = wished_machine(wish, here)
    probe = _probe(here) if verify else None
    speeds = wished_speeds(wish, machine, _speeds_here(wish, here, probe))
    question = PlanQuestion(engine_config, model, machine, stored, speeds)
    _compare_quantisations(question, several, as_json)
    lengths = ForecastSizes(tokens, prompt)
    planned, measured = report(engine_config.model, question, refused, lengths), None
    if planned.plan is not None:
        check_statistics(planned.plan, model)
    if probe is not None and planned.fits:
        measured, question, lengths = _verified(question, probe, lengths)
        planned = report(engine_config.model, question, refused, lengths)
    if compare:
        planned.compared.extend(compared(question))
    planned = dataclasses.replace(planned, assumed=assumed_text(wish, machine, question.speeds))
    if as_json:
        typer.echo(json.dumps(planned.as_dict() | ({"measured": measured} if verify else {}), indent=1))
    else:
        show(planned, measured)
    raise typer.Exit(0 if planned.fits else 2)


def _verified(question: PlanQuestion, probe: MachineProbe, lengths: ForecastSizes) -> Verified:
    from tandem.bench.sample import verified

    return verified(question, probe, lengths)


def _config(argv: list[str], named: str | None, one_gpu: bool) -> tuple[EngineConfig, tuple[str, ...]]:
    """The flags that can be met, and why the others cannot. one_gpu: unless they say how many. Raises ConfigError where
    no model is named, and for flags about chats that no model could meet."""
    from tandem.errors import ConfigError
    from tandem.flags.engine_config import EngineConfig
    from tandem.flags.ways import on_one_gpu
    from tandem.server.chat.chat_flags import check_chat_flags

    engine_config, refused = EngineConfig.possible([*([] if named is None else [named]), *argv])
    if engine_config is None:
        raise ConfigError("no model is named; try kt plan DIRECTORY, or --config deepseek-v3", *refused[1:])
    # a template of a model that is not here is where that will be
    check_chat_flags(engine_config if named is None else dataclasses.replace(engine_config, chat_template=None))
    return on_one_gpu(engine_config) if one_gpu else engine_config, refused


def _this_machine() -> Machine:
    from tandem.kernels.this_machine import this_machine

    return this_machine()


def _check_here(wish: MachineWish, verify: bool) -> None:
    """Raises ConfigError where another machine is asked about, and measured."""
    from tandem.errors import ConfigError

    if verify and wish.anything:
        raise ConfigError(
            "--verify measures this machine; leave --gpu, --ram, --bandwidth, --cpu, --isa and --pcie out"
        )


def _probe(machine: Machine) -> MachineProbe:
    from tandem.bench.probes import MachineProbe

    return MachineProbe(machine)


def _speeds_here(wish: MachineWish, machine: Machine, probe: MachineProbe | None) -> Speeds | None:
    """As the probe says, or the CPU's measured in a second; None of another machine."""
    from tandem.bench import probes

    if probe is not None:
        return probe.speeds()
    return None if wish.other_cpu else probes.cpu_speeds(machine, machine.tiers[-1])


def _subject(engine_config: EngineConfig, named: str | None) -> Subject:
    """The model's sizes and how it is stored. Raises what reading them raises."""
    from tandem.bench.architectures import named_like, named_subject
    from tandem.engine.start.model_files import inspect
    from tandem.engine.start.planning import model_as_stored, stored_at
    from tandem.errors import CheckpointError, HubError
    from tandem.hub.names import may_be_path

    if named is not None:
        return named_subject(named)

    def look(path: Path) -> Subject:
        model = model_as_stored(path, engine_config)
        return model, stored_at(path, model, engine_config.kt_weight_path)

    try:
        return inspect(engine_config.model, look)
    except HubError as error:
        raise HubError(f"{error}\n{_without_the_hub(engine_config.model)}") from error
    except CheckpointError as error:
        if may_be_path(engine_config.model) or named_like(engine_config.model) is None:
            raise
        raise CheckpointError(f"{error}\n{_without_the_hub(engine_config.model)}") from error


def _subjects(engine_config: EngineConfig, named: str | None) -> tuple[Files, Subject]:
    """Files of a folder or repository that has several, none of which was named; and the model. Raises as `_subject`.
    A file that is not read is told at once."""
    files: Files = []
    for name, nbytes, subject in [] if named is not None else _each_quantisation(engine_config):
        if isinstance(subject, Exception):
            typer.echo(f"{name}: {subject}", err=True)
        else:
            files.append((name, nbytes, subject))
    return files, files[0][2] if files else _subject(engine_config, named)


def _each_quantisation(engine_config: EngineConfig) -> list[Inspected[Subject]]:
    """As `inspect_each`; [] where no hub answers."""
    from tandem.engine.start.model_files import inspect_each
    from tandem.engine.start.planning import model_as_stored, stored_at
    from tandem.errors import HubError

    def look(path: Path) -> Subject:
        model = model_as_stored(path, engine_config)
        return model, stored_at(path, model, engine_config.kt_weight_path)

    try:
        return inspect_each(engine_config.model, look)
    except HubError:  # what is here may be enough; who reads it says what is missing
        return []


def _compare_quantisations(
    question: PlanQuestion, several: Files, as_json: bool
) -> None:
    """Nothing where there are not several. Raises typer.Exit: 0 where one fits."""
    if not several:
        return
    from tandem.cli.plan_text import show_quantisations
    from tandem.planner.forecast.quantisations import as_dict, compare_quantisations
    from tandem.planner.forecast.report import machine_text

    machine = machine_text(question.machine)
    rows = compare_quantisations(
        (name, nbytes, dataclasses.replace(question, model=model, stored=stored))
        for name, nbytes, (model, stored) in several
    )
    if as_json:
        found = {"model": question.config.model, "machine": machine, "quantisations": list(map(as_dict, rows))}
        typer.echo(json.dumps(found, indent=1))
    else:
        show_quantisations(question.config.model, machine, rows)
    raise typer.Exit(0 if any(row.fits for row in rows) else 2)


def _without_the_hub(model: str) -> str:
    """Advice on what to type where no hub answers."""
    from tandem.bench.architectures import NAMES, named_like

    name = named_like(model)
    if name is not None:
        return f"Its architecture is known as it was first published: kt plan --config {name}"
    return f"Without a hub, --config knows the sizes of {NAMES}"
