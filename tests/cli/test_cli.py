"""The commands of `kt`: help, version, flags, plan, errors as one line. No model is loaded here."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from tandem import __version__
from tandem.cli import stats_plot
from tandem.cli.app import app, run
from tandem.cli.other_names import Commands, ModelCommands, flowing, refuse_repeats
from tandem.cli.serve import tell_at_once
from tandem.errors import ConfigError
from tandem.flags.engine_config import FLAGS

COMMANDS = ["serve", "plan", "chat", "convert", "version", "doctor", "demo", "model", "quality", "bench"]
MODEL = {
    "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "rms_norm_eps": 1e-6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "intermediate_size": 128, "max_position_embeddings": 512, "rope_theta": 1e4,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": True,
}  # fmt: skip


def kt(*argv: str) -> Result:
    return CliRunner().invoke(app, list(argv), env={"COLUMNS": "100", "TERM": "dumb"})


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_one_screen_with_an_example(command: str) -> None:
    shown = kt(command, "--help")
    assert shown.exit_code == 0
    assert len(shown.stdout.splitlines()) <= 40
    assert re.search(rf"(Example: |\$ )kt {command}", shown.stdout)


@pytest.mark.parametrize(
    ("command", "default"),
    [
        (["quality"], "default: INT8 and INT4"), (["quality"], "default: one that Tandem has"),
        (["bench", "kernels"], "default: bf16"), (["bench", "decode"], "default: 1, 8"),
    ],
)  # fmt: skip
def test_help_says_what_holds_where_a_flag_is_left_out(command: list[str], default: str) -> None:
    """Rich takes [text in brackets] for markup."""
    assert default in " ".join(re.sub("[│╭╰─]", " ", kt(*command, "--help").stdout).split())


def test_app_help_names_every_command() -> None:
    shown = kt("--help").stdout
    assert all(re.search(rf"\b{command}\b", shown) for command in COMMANDS)


def test_serve_help_all_shows_every_flag() -> None:
    shown = kt("serve", "--help-all").stdout
    assert [f.spellings[0] for f in FLAGS if f.spellings[0] not in shown] == []
    assert "Not available yet" in shown


def test_a_terminal_is_told_at_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tell_at_once("starting demo …")
    assert capsys.readouterr().err == ""  # a log needs no such line
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    tell_at_once("starting demo …")
    assert capsys.readouterr().err == "starting demo …\n"


def test_version_is_a_flag_too() -> None:
    assert kt("--version").output == kt("version").output


def test_reasons_have_room_on_a_narrow_terminal(model_dir: Path) -> None:
    """A long value is wrapped, not its reason squeezed into a few letters a line."""
    shown = CliRunner().invoke(app, ["serve", str(model_dir), "--plan-only"], env={"COLUMNS": "80"}).output
    heading = next(line for line in shown.splitlines() if line.startswith("choice"))
    assert 80 - heading.index("because") >= 32


def test_version() -> None:
    shown = kt("version")
    assert (shown.exit_code, shown.stdout.splitlines()[0]) == (0, f"Tandem {__version__}")
    assert "torch 2." in shown.stdout


@pytest.mark.parametrize("argv", [["--help"], ["serve", "--help"], ["chat", "--help"], ["plan", "--help"]])
def test_help_imports_little(argv: list[str]) -> None:
    """What half a second is spent on: of what Tandem depends on typer and rich alone, and few modules of its own."""
    code = f"""if True:
        import sys
        from tandem.cli.app import app
        app({argv}, standalone_mode=False)
        print(*sorted(sys.modules))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    imported = done.stdout.splitlines()[-1].split()
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[^\w-]", wish)[0].replace("_", "-").lower() for wish in project["dependencies"]}
    distributions = packages_distributions()
    used = {name.replace("_", "-").lower() for each in imported for name in distributions.get(each, ())}
    assert used & needed == {"typer", "rich"}
    assert 40 < len([name for name in imported if name.startswith("tandem.")]) <= 150


def test_the_version_is_told_without_torch() -> None:
    code = """if True:
        import sys
        from tandem.cli.app import app
        app(['version'], standalone_mode=False)
        print('torch' in sys.modules)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


def test_a_model_that_is_here_is_found_without_torch(demo_dir: Path) -> None:
    """The process that asks goes on to serve."""
    code = """if True:
        import sys
        from tandem.cli.serve import all_is_here
        from tandem.flags.engine_config import EngineConfig
        print([all_is_here(EngineConfig(model=name)) for name in sys.argv[1:]], 'torch' in sys.modules)"""
    command = [
        sys.executable,
        "-c",
        code,
        "demo",
        str(demo_dir),
        str(demo_dir / "tokenizer.json"),
        "org/not-here",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "[True, True, True, False] False\n", done.stderr


def test_what_is_not_here_is_prepared_by_a_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whose error is the last line, and whose status is ours."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(SystemExit) as left:
        run(["serve", "org/not-here", "--api-key", "s3cret"])
    shown = capfd.readouterr().err
    assert left.value.code == 1 and shown.startswith("error: org/not-here") and len(shown.splitlines()) == 1


@pytest.mark.parametrize(
    ("argv", "status", "says"),
    [
        (["serve", "demo", "--prot", "3"], 2, "nearest known one is --port"),
        (["serve", "demo", "--tp", "2"], 2, "heads of keys cannot be divided among 2 ranks"),
        (["serve", "--model", "/no/such/model"], 1, "/no/such/model does not exist"),
        (["serve", "--port", "30000"], 2, "try `kt serve demo`"),
        (["serve", "--model", "demo", "--model", "b"], 2, "--model is given twice, as demo and as b: give one"),
        (["chat", "--port", "1", "--port=2"], 2, "--port is given twice, as 1 and as 2"),
        (["chat", "--system", "--port", "--port", "1", "--system", "x"], 2, "--system is given twice, as --port and"),
        (["bench", "serve", "--url", "a", "--url", "b"], 2, "--url is given twice, as a and as b"),
        (["run", "org/name"], 2, "there is no kt run: give kt serve MODEL, then kt chat"),
        (["quant", "a", "b"], 2, "there is no kt quant: give kt convert MODEL OUT"),
        (["model", "remove", "org/name"], 2, "there is no kt model remove: give kt model rm NAME"),
    ],
)
def test_errors_are_one_line(
    argv: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        run(argv)
    shown = capsys.readouterr().err
    assert left.value.code == status
    assert shown.startswith("error: ")
    assert says in shown
    assert len(shown.splitlines()) == 1


def test_an_option_may_have_a_value_again_and_some_have_several() -> None:
    """A key is not shown."""
    commands: Any = typer.main.get_command(app)
    chat, kernels = commands.commands["chat"], commands.commands["bench"].commands["kernels"]
    refuse_repeats(chat, ["--port", "1", "--port=1", "--model", "a", "--", "--model", "b"])
    refuse_repeats(kernels, ["--tokens", "1", "--tokens", "8"])
    with pytest.raises(ConfigError) as refused:
        refuse_repeats(chat, ["--api-key", "s3cret", "--api-key", "t0ken"])
    assert str(refused.value) == "--api-key is given twice, with two values: give one"


def test_other_programs_names_are_of_no_command_of_ours_and_of_commands_that_exist() -> None:
    found = typer.main.get_command(app)
    for group, told in ((found, Commands), (found.commands["model"], ModelCommands)):
        assert not set(told.instead) & set(group.commands)
        for text in told.instead.values():
            names = re.findall(r"kt ([a-z]+)(?: (pull|list|rm|kernels))?", text)
            for name, inner in names:
                assert name in found.commands and (not inner or inner in found.commands[name].commands)


def test_files_that_cannot_be_written_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, picture = tmp_path / "counts.pt", tmp_path / "picture.png"
    torch.save({"logical_count": torch.ones(1, 3, 8)}, counts)

    def no_space(path: Path, *_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(stats_plot, "draw", no_space)
    folder, full = f"--png {tmp_path} is a folder: give a file", f"{picture}: No space left on device"
    for png, status, message in ((tmp_path, 2, folder), (picture, 1, full)):
        with pytest.raises(SystemExit) as left:
            run(["stats", str(counts), "--png", str(png)])
        assert left.value.code == status
        assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.parametrize("module", ["tandem.launch_server", "tandem serve", "tandem.cli serve"])
def test_modules_are_the_same_program(module: str) -> None:
    command = [sys.executable, "-m", *module.split(), "--model", "demo", "--kt-amx-methd", "INT4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: unknown flag --kt-amx-methd; the nearest known one is --kt-amx-method"
    )


def test_plan_only_prints_each_choice_with_its_reason(model_dir: Path) -> None:
    shown = kt(
        "serve", str(model_dir), "--plan-only", "--kt-method", "INT4", "--kt-cpuinfer", "1", "--nnodes", "1"
    )
    assert shown.exit_code == 0, shown.output
    assert re.search(r"expert format +int4 +--kt-method INT4", shown.stdout)
    assert re.search(r"threads +1 +--kt-cpuinfer 1", shown.stdout)
    assert re.search(r"context length +512 +the model's own limit", shown.stdout)
    assert "note: --nnodes 1 changes nothing" in shown.stdout


def test_the_demo_s_plan_needs_no_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tandem.checkpoint.resolve.cache_dir", lambda: tmp_path)
    shown = kt("serve", "demo", "--plan-only")
    assert shown.exit_code == 0, shown.output
    assert re.search(r"context length +8192", shown.stdout)
    assert not list(tmp_path.iterdir())


def test_help_has_paragraphs_that_fill_the_terminal() -> None:
    """Lines of a docstring are longer than 80 columns: broken there and at its own ends, they were ragged."""
    shown = CliRunner().invoke(app, ["plan", "--help"], env={"COLUMNS": "80", "TERM": "dumb"}).stdout
    text = [line.strip() for line in shown.partition("╭")[0].splitlines()]
    first = next(i for i, line in enumerate(text) if line.startswith("MODEL is a directory"))
    assert all(len(line) > 60 for line in text[first : first + 2])
    assert flowing("a\nb\n\nExample: c\nExample: d") == "a b\n\nExample: c\nExample: d"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_locale_without_our_letters_is_no_error(encoding: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tandem", "serve", "--help"],
        capture_output=True, timeout=60, env=os.environ | {"PYTHONIOENCODING": encoding},
    )  # fmt: skip
    assert done.returncode == 0 and b"BF16, INT8, INT4, ?" in done.stdout
