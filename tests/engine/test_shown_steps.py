"""What a log is told of long work, where no terminal shows a bar."""

from __future__ import annotations

import pytest

from tandem.engine.start import shown_steps


def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seconds: int) -> list[str]:
    """Work of so many seconds, which reports each of them."""
    now = [0.0]
    monkeypatch.setattr(shown_steps, "monotonic", lambda: now[0])
    with shown_steps.shown_steps("opening", counted=shown_steps.gigabytes, begin="model: ") as report:
        for second in range(1, seconds + 1):
            now[0] = float(second)
            report("layer", second * 10**9, seconds * 10**9)
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


def test_short_work_is_silent(monkeypatch, capsys) -> None:
    assert told(monkeypatch, capsys, 4) == []


def test_lines_of_long_work_come_ever_further_apart(monkeypatch, capsys) -> None:
    lines = told(monkeypatch, capsys, 3600)
    assert lines[0] == "model: layer, 5.0 of 3600.0 GB" and lines[1].startswith("model: layer, 10.0 of")
    assert 30 < len(lines) < 60
