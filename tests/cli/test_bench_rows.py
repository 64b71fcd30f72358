"""Rows of measurements: where they are kept, what replaces what, and that a half-written file is never left."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tandem.bench import decode, figures, rows, serve, speculation
from tandem.bench.rows import folder_name, keep, of_bench, stamp, write
from tandem.spec import small_files

MACHINE = "NVIDIA H200; INTEL(R) XEON(R) PLATINUM 8581C, 16 threads"


def row(bench: str = "decode", machine: str = MACHINE, **more: object) -> dict[str, object]:
    return {"bench": bench, **more} | stamp(machine)


def test_a_commit_with_changes_is_not_that_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results that runs write and files that git does not know change nothing that is measured."""
    package, results = tmp_path / "src" / "package", tmp_path / "benchmarks" / "results"
    for file in (package / "rows.py", results / "history.jsonl"):
        file.parent.mkdir(parents=True)
        file.write_text("\n")
    monkeypatch.setattr(rows, "__file__", str(package / "rows.py"))

    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True)

    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    clean = rows.commit()
    assert clean is not None and len(clean) >= 7 and not clean.endswith("+")
    (tmp_path / "unknown").write_text("")
    (results / "history.jsonl").write_text("{}\n")
    assert rows.commit() == clean
    (package / "rows.py").write_text("changed\n")
    assert rows.commit() == f"{clean}+"
    git("add", ".")
    assert rows.commit() == f"{clean}+"


def test_a_machine_has_one_folder_with_a_plain_name() -> None:
    assert folder_name(MACHINE) == "nvidia-h200-intel-xeon-platinum-8581c-16-threads"


def test_rows_lie_by_machine_and_bench(tmp_path: Path) -> None:
    written = [row(batch=1, tok_s=5.0), row("install", "AMD EPYC", how="wheel", s=40)]
    assert keep(written, tmp_path) == [
        tmp_path / folder_name(MACHINE) / "decode.json",
        tmp_path / "amd-epyc" / "install.json",
    ]
    assert json.loads((tmp_path / "amd-epyc" / "install.json").read_text()) == [written[1]]


def test_a_new_figure_replaces_that_of_the_same_configuration_only(tmp_path: Path) -> None:
    keep([row(batch=1, gpu_share=0.5, tok_s=5.0), row(batch=8, gpu_share=0.5, tok_s=20.0)], tmp_path)
    (file,) = keep([row(batch=1, gpu_share=0.5, tok_s=6.0)], tmp_path)
    assert sorted((r["batch"], r["tok_s"]) for r in json.loads(file.read_text())) == [(1, 6.0), (8, 20.0)]


def test_every_run_is_one_line_of_history(tmp_path: Path) -> None:
    for speed in (5.0, 6.0):
        keep([row(batch=1, tok_s=speed), row(batch=8, tok_s=speed)], tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [line["rows"] for line in lines] == [
        [{"batch": 1, "tok_s": speed}, {"batch": 8, "tok_s": speed}] for speed in (5.0, 6.0)
    ]
    assert {"bench", "machine", "commit", "command", "date", "rows"} == set(lines[0])


def test_a_row_without_its_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="machine"):
        keep([{"bench": "decode", "tok_s": 1.0}], tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_row_is_json_for_programs_and_a_line_for_people() -> None:
    asked = {"config": "c", "format": "INT4", "strategy": "uniform", "gpu_share": 0.5, "tok_s": 182.18}
    for terminal, text in (
        (True, "INT4, uniform, 50% of the experts on the GPU: 182.2 tokens/s\n"),
        (False, json.dumps(asked) + "\n"),
    ):
        out = io.StringIO()
        rows.say(Console(file=out, force_terminal=terminal, width=200), asked)
        assert out.getvalue() == text


def test_who_computed_is_not_the_bench() -> None:
    assert of_bench("kernels", {"bench": "torch loop", "ms": 1.0}) == {
        "bench": "kernels",
        "by": "torch loop",
        "ms": 1.0,
    }


def test_a_file_is_one_list(tmp_path: Path) -> None:
    rows = [row(batch=1, tok_s=5.0)]
    write(rows, tmp_path / "new" / "rows.json")
    assert json.loads((tmp_path / "new" / "rows.json").read_text()) == rows
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["rows.json"]


def test_what_was_measured_before_an_error_is_written(tmp_path: Path) -> None:
    def found() -> Iterator[rows.Row]:
        yield {"bench": "some", "tok_s": 1.0}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rows.shown(found(), lambda _: "", tmp_path / "rows.json")
    assert json.loads((tmp_path / "rows.json").read_text()) == [{"bench": "some", "tok_s": 1.0}]


def made_up(kind: type) -> Any:
    """A row with something in each field."""
    values = {"str": "x", "int": 1, "float": 1.0, "bool": True}
    return kind(**{each.name: values.get(str(each.type), []) for each in dataclasses.fields(kind)})


@pytest.mark.parametrize(
    ("bench", "kind"),
    [(decode, decode.DecodeRow), (serve, serve.LoadRow), (speculation, speculation.SpeculationRow)],
    ids=["decode", "serve", "speculative"],
)
def test_each_bench_keeps_its_rows_after_ctrl_c(tmp_path, monkeypatch, bench, kind) -> None:
    def interrupted(*_: object) -> Iterator[Any]:
        yield (made_up(kind), []) if bench is serve else made_up(kind)
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench.run(SimpleNamespace(transformers=False, llama_cpp=False), tmp_path / "rows.json")
    assert json.loads((tmp_path / "rows.json").read_text()) == [dataclasses.asdict(made_up(kind))]


def test_what_is_printed_to_is_not_replaced(tmp_path: Path) -> None:
    """`--out /dev/stdout > rows`: what is printed later belongs there, too."""
    script = "from pathlib import Path; from tandem.spec.small_files import write_output; print('a', flush=True)"
    script += "; write_output(Path('/dev/stdout'), b'rows\\n'); print('b')"
    with (tmp_path / "rows").open("ab") as out:
        paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([sys.executable, "-c", script], stdout=out, check=True, env=paths)
    assert (tmp_path / "rows").read_text() == "a\nrows\nb\n"


def test_a_figure_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = figures.new_pyplot().figure()
    figures.save_figure(figure, tmp_path / "new" / "figure.png")
    before = (tmp_path / "new" / "figure.png").read_bytes()
    assert before.startswith(b"\x89PNG") and not figures.new_pyplot().get_fignums()

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(small_files, "write_whole", full)
    with pytest.raises(OSError, match="no space"):
        figures.save_figure(figures.new_pyplot().figure(), tmp_path / "new" / "figure.png")
    assert (tmp_path / "new" / "figure.png").read_bytes() == before


def test_what_the_repository_keeps_can_be_read() -> None:
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    for file in results.glob("*/*.json"):
        if file.parent.name == "lab":  # experiments, each in a form of its own
            continue
        rows = json.loads(file.read_text())
        assert rows
        assert {r["bench"] for r in rows} == {file.stem}
        assert {folder_name(r["machine"]) for r in rows} == {file.parent.name}
    histories = list(results.glob("history*.jsonl"))
    assert histories
    for line in [line for file in histories for line in file.read_text().splitlines()]:
        assert json.loads(line)["rows"]
