"""Where a result cannot be written, a command says so before it measures."""

from __future__ import annotations

import errno
import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from tandem.bench import prefill
from tandem.cli.app import app
from tandem.convert.record import only_one
from tandem.errors import ConfigError
from tandem.quality.saved_logits import Origin, writing
from tandem.quality.text import read_text

COMMANDS = [
    "bench kernels --out", "bench kernels --plot", "bench decode --out", "bench prefill --out", "bench serve --out",
    "bench serve --long-prompt 9 --plot", "bench experts --out", "bench experts --plot", "bench report --out",
    "quality demo --out", "quality demo --plot", "quality demo --save-logits", "stats none.pt --png",
]  # fmt: skip


def refusal(line: str) -> str:
    done = CliRunner().invoke(app, shlex.split(line))
    assert isinstance(done.exception, ConfigError), done.output
    return str(done.exception)


@pytest.mark.parametrize("line", COMMANDS)
def test_what_cannot_be_written_is_refused_at_once(line: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    flag = line.split()[-1]
    assert refusal(f"{line} {file / 'x.json'}") == f"{flag} {file / 'x.json'} cannot be written: {file} is no folder"
    assert refusal(f"{line} /proc/x.json") == f"{flag} /proc/x.json cannot be written: No such file or directory"


@pytest.mark.parametrize("line", ["bench kernels --plot", "quality demo --out", "bench report --out", "stats x --png"])
def test_a_folder_is_no_file(line: str, tmp_path: Path) -> None:
    assert refusal(f"{line} {tmp_path}") == f"{line.split()[-1]} {tmp_path} is a folder: give a file"


@pytest.mark.parametrize("place", ["new.json", "new/folder/x.json", "old.json", "folder"])
def test_what_can_be_written_is_not_touched(place: str, tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("[]")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    # What is refused next shows that the place was taken.
    assert "without --config" in refusal(f"bench decode --layers 3 --out {tmp_path / place}")
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "old.json").read_text() == "[]"
    assert "without --config" in refusal("bench decode --layers 3 --out /dev/stdout")


def test_a_link_is_followed(tmp_path: Path) -> None:
    """So is /dev/stdout, one to a file where the shell writes to a file."""
    (tmp_path / "good").symlink_to(tmp_path / "rows.json")
    (tmp_path / "bad").symlink_to("/proc/rows.json")
    assert "without --config" in refusal(f"bench decode --layers 3 --out {tmp_path / 'good'}")
    assert "cannot be written: No such file" in refusal(f"bench decode --layers 3 --out {tmp_path / 'bad'}")


def test_a_place_that_cannot_be_looked_at_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(_path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "exists", closed)
    assert refusal("bench decode --out /closed/x.json") == "--out /closed/x.json cannot be written: Permission denied"


def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    origin = Origin("demo", "digest", 1, 8, 8)
    with pytest.raises(ConfigError, match="is no file: give one"), writing(pipe, origin):
        pass
    assert pipe.is_fifo()


def test_prompts_that_were_measured_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_request: object) -> Iterator[dict]:
        yield {"bench": "prefill", "tokens": 8, "tok_s": 1.0}
        raise KeyboardInterrupt

    monkeypatch.setattr(prefill, "measure", interrupted)
    monkeypatch.setattr(prefill, "Machine", SimpleNamespace(detect=lambda: SimpleNamespace(gpus=("one",))))
    monkeypatch.setattr(prefill, "machine_name", lambda *_: "here")
    monkeypatch.setattr(prefill, "use_one_torch_thread", lambda: None)
    request = prefill.PrefillFlags("demo", (), (), (), None, 8, None, 1, None, "auto", 0, ("auto",))
    for out in (tmp_path / "rows.json", tmp_path):  # a folder keeps them by machine
        with pytest.raises(KeyboardInterrupt):
            prefill.run(request, out)
    for file in (tmp_path / "rows.json", tmp_path / "here" / "prefill.json"):
        assert [row["tokens"] for row in json.loads(file.read_text())] == [8]


def test_a_directory_that_cannot_be_made_is_said_to_be_one(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for out, reason in ((file, "it is no folder"), (file / "under", "Not a directory")):
        with pytest.raises(ConfigError, match=rf"cannot be made \({reason}\): give another directory"), only_one(out):
            pass


def test_a_text_that_cannot_be_read_is_named_by_its_own_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--calibrate .*none cannot be read: No such file or directory$"):
        read_text(tmp_path / "none", "--calibrate")
    latin = tmp_path / "latin"
    latin.write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match=r"^--text .*latin cannot be read: it is no UTF-8"):
        read_text(latin)
