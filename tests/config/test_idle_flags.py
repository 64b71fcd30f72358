"""A flag that this way of running a command does not read is an error; until then it was ignored."""

from __future__ import annotations

import re
import shlex

import pytest
from typer.testing import CliRunner

from tandem.cli.app import app
from tandem.cli.bench import bench

UNREAD = [
    ("decode --gpu-share 0.5 --layers 3", "--gpu-share, --layers change nothing without --config: leave them out"),
    ("decode --foresight both", "--foresight changes nothing without --config: leave it out"),
    ("decode --no-governor", "--no-governor changes nothing without --speculative"),
    ("decode --speculative-num-steps 3", "--speculative-num-steps changes nothing without --speculative"),
    ("decode demo --config qwen3-30b-a3b", "MODEL changes nothing with --config"),
    ("decode --transformers --config qwen3-30b-a3b", "--transformers changes nothing with --config"),
    ("decode --speculative NGRAM --gpu-share 0", "--gpu-share changes nothing with --speculative"),
    ("decode --speculative NGRAM --layers 2", "--layers changes nothing with --speculative"),
    ("decode demo --speculative NGRAM --config qwen3-30b-a3b", "MODEL changes nothing with --speculative and --config"),
    ("decode --explain --steps 3", "--steps changes nothing with --explain"),
    ("prefill --explain --cached 3", "--cached changes nothing with --explain"),
    ("kernels --explain --threads 2", "--threads changes nothing with --explain"),
    ("serve --gaps 3", "--gaps changes nothing without --long-prompt"),
    ("serve --url http://127.0.0.1:1 demo --flag=--x", "MODEL, --flag change nothing with --url: leave them out"),
    ("serve --url http://127.0.0.1:1 --long-prompt 9 --config demo", "--config changes nothing with --url"),
    ("serve --long-prompt 5 --rate 3", "--rate changes nothing with --long-prompt"),
    ("serve --long-prompt 5 --layers 3", "--layers changes nothing without --config"),
    ("serve --prompts x.json --input-len 5", "--input-len changes nothing with --prompts"),
]


def refusal(line: str) -> str:
    done = CliRunner().invoke(app, shlex.split(line))
    assert done.exit_code == 1 and done.exception is not None
    return str(done.exception)


@pytest.mark.parametrize(("line", "message"), UNREAD)
def test_a_flag_of_another_way_to_bench_is_refused(line: str, message: str) -> None:
    assert message in refusal(f"bench {line}")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--method FP8 --group 64", "--group changes nothing with --method FP8: leave it out"),
        ("--quant-method mxfp4 --group 32", "--group changes nothing with --method MXFP4"),
        ("--calibrate-tokens 5", "--calibrate-tokens changes nothing without --calibrate"),
    ],
)
def test_a_flag_that_a_conversion_does_not_read_is_refused(flags: str, message: str) -> None:
    assert message in refusal(f"convert model out {flags}")


def test_flags_that_are_read_are_taken() -> None:
    done = CliRunner().invoke(app, shlex.split("bench kernels --explain --tier scalar --tokens 1 --format int4"))
    assert done.exit_code == 0 and "scalar" in done.output


def test_each_name_that_is_refused_is_a_parameter() -> None:
    from tandem.flags import idle_in_bench

    commands = {each.callback.__name__: each.callback for each in bench.registered_commands if each.callback}
    known = {name for each in ("kernels", "decode", "prefill", "serve") for name in commands[each].__annotations__}
    groups = [value for name, value in vars(idle_in_bench).items() if re.fullmatch(r"_[A-Z_]+", name)]
    assert len(groups) == 8 and set().union(*groups) <= known
