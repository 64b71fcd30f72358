"""`kt stats`: the numbers against ones worked out by hand, and what is shown of them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from recorded_steps import Steps
from tandem.bench.placement.traces import TraceShape, load_trace
from tandem.cli.app import app
from tandem.errors import ConfigError
from tandem.experts.usage.recorder import RecordedRows
from tandem.experts.usage.usage_file import UsageRecord, write_usage
from tandem.experts.usage.usage_summary import by_chance, summary


def test_even_use() -> None:
    found = summary(UsageRecord(torch.full((1, 2, 20), 1000)))
    assert found.effective == pytest.approx(20)
    for point in found.curve:
        assert point.tokens == pytest.approx(point.experts)
        assert point.experts < point.chance < point.experts * 1.1  # 3 % of 1000 is a standard deviation


def test_uneven_use() -> None:
    """Layer 3: half on expert 0, the rest even on two others; layer 7: all on one; layer 9: never reached."""
    counts = torch.zeros(3, 10)
    counts[0, :3] = torch.tensor([40.0, 20.0, 20.0])
    counts[1, 4] = 20.0
    record = UsageRecord(counts[None], layers=(3, 7, 9))
    found = summary(record)
    assert [layer.layer for layer in found.layers] == [3, 7, 9]
    assert found.layers[0].effective == pytest.approx(math.exp(0.5 * math.log(2) + 0.5 * math.log(4)))
    assert (found.layers[1].effective, found.layers[1].hottest_tenth, found.layers[1].unused) == (1.0, 1.0, 9)
    assert (found.layers[2].effective, found.layers[2].unused) == (0.0, 10)
    assert found.layers[0].hottest_tenth == 0.5 and found.layers[0].unused == 7
    assert [point.tokens for point in found.curve] == [
        0.6,
        0.8,
        1.0,
        1.0,
        1.0,
    ]  # 2 of 30 experts (1.5), 3, 6, …
    assert found.relative[0, :3].tolist() == [5.0, 2.5, 2.5] and not found.relative[2].any()


def test_what_was_on_the_gpu() -> None:
    """Experts moved between two steps: each step counts where its experts were."""
    counts = torch.tensor([[[3, 1]], [[0, 4]]])
    moved = torch.tensor([[[True, False]], [[False, True]]])
    found = summary(UsageRecord(counts, gpu_experts=moved))
    assert (found.gpu_experts, found.gpu_tokens) == (0.5, 7 / 8)
    found = summary(UsageRecord(counts, gpu_experts=moved[1]))
    assert (found.gpu_experts, found.gpu_tokens) == (0.5, 5 / 8)
    assert summary(UsageRecord(counts)).gpu_tokens is None


def test_chance_is_the_same_every_time() -> None:
    counts = torch.rand(4, 50).double() * 9
    assert torch.equal(by_chance(counts), by_chance(counts))
    assert by_chance(counts).sum() == pytest.approx(float(counts.sum()), rel=4 / float(counts.sum()) ** 0.5)


def test_nothing_counted() -> None:
    with pytest.raises(ConfigError, match="no tokens"):
        summary(UsageRecord(torch.zeros(1, 2, 3)))


def made_up(layers: int, experts: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    popularity = torch.rand(layers, experts, generator=generator) ** 4
    return (popularity * 1000).long()[None]


def show(*arguments: object, width: int = 100):
    return CliRunner().invoke(
        app, ["stats", *map(str, arguments)], env={"COLUMNS": str(width), "TERM": "dumb"}
    )


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize(("layers", "experts"), [(48, 512), (3, 8), (94, 128)])
def test_the_terminal_is_wide_enough(tmp_path: Path, width: int, layers: int, experts: int) -> None:
    numbers = tuple(range(3, layers + 3))
    write_usage(tmp_path / "x.pt", UsageRecord(made_up(layers, experts), "stat", "toy", 12345, 678, numbers))
    shown = show(tmp_path / "x.pt", width=width)
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(shown.output.split())
    assert f"toy, {layers} MoE layers of {experts} experts, 12,345 tokens in 678 steps" in text
    rows = [line.split()[0] for line in lines if line.strip() and line.split()[0].isdigit()]
    assert rows == [str(number) for number in numbers]
    assert "of the routed tokens" in text and "50%" in text


def test_a_cell_shows_the_most_used_of_its_experts(tmp_path: Path) -> None:
    counts = torch.full((1, 1, 64), 1)
    counts[0, 0, 33] = 500
    write_usage(tmp_path / "x.pt", UsageRecord(counts))
    shown = show(tmp_path / "x.pt", width=52)  # 16 cells of 4 experts
    (row,) = (line for line in shown.output.splitlines() if line.split()[:1] == ["0"])
    assert row.rstrip()[-16:] == "·" * 8 + "█" + "·" * 7
    assert "most used of 4 experts" in " ".join(shown.output.split())


def test_json_and_picture(tmp_path: Path) -> None:
    steps = Steps(tmp_path, mode="per_token", gpu_experts=True)
    steps.recorder.start()
    ids = torch.cat([steps.run(RecordedRows(0, 0, 8)), steps.run(RecordedRows(0, 8, 3))])
    file = steps.recorder.dump().result(120)
    shown = show(file, "--json", "--png", tmp_path / "out" / "x.png")
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.output)
    assert [layer["layer"] for layer in found["layers"]] == [0, 2, 5]
    assert {layer["tokens"] for layer in found["layers"]} == {22.0}
    assert (found["tokens"], found["passes"], found["mode"], found["experts"]) == (11, 2, "per_token", 7)
    assert found["gpu_experts"] == pytest.approx(1 / 7)
    assert found["gpu_tokens"] == pytest.approx(float((ids == 2).float().mean()))
    assert (tmp_path / "out" / "x.png").read_bytes().startswith(b"\x89PNG")


def test_files_that_hold_something_else(tmp_path: Path) -> None:
    torch.save({"weights": torch.zeros(3)}, tmp_path / "x.pt")
    torch.save(torch.zeros(3, 4), tmp_path / "empty.pt")
    (tmp_path / "code.py").write_text("print('no pickle')")
    for name, why in (
        ("x.pt", "logical_count"), ("empty.pt", "no tokens"), ("absent.pt", "cannot be read: No such file"),
        ("code.py", "no file of torch.save"),
    ):  # fmt: skip
        shown = show(tmp_path / name)
        assert isinstance(shown.exception, ConfigError)
        assert name in str(shown.exception) and why in str(shown.exception)
        assert "weights_only" not in str(shown.exception)  # torch's advice is to execute what is in the file


def test_a_recorded_stream_is_a_trace(tmp_path: Path) -> None:
    """What per_token records is what `kt bench experts --routing FILE` reads."""
    steps = Steps(tmp_path, mode="per_token")
    steps.recorder.start()
    ids = torch.cat([steps.run(RecordedRows(0, 0, 8)), steps.run(RecordedRows(0, 8, 3))])
    file = steps.recorder.dump().result(120)
    assert torch.equal(load_trace(str(file), TraceShape(11, 3, 7, 2)), ids.short())
