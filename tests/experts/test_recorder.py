"""The recorder of expert usage: what it counts, what it writes, and what happens when it cannot."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pytest
import torch
from torch import Tensor

from recorded_steps import EXPERTS, LAYERS, Steps, generate, tiny_engine
from tandem.errors import ConfigError, EngineError, RequestError
from tandem.experts.placement import load_counts
from tandem.experts.usage import recorder
from tandem.experts.usage.recorder import RecordedRows
from tandem.experts.usage.usage_file import UsageRecord, read_usage, write_usage


def counts_of(ids: Tensor) -> Tensor:
    """[layers, experts] of ids [rows, layers, top_k]."""
    each = [torch.bincount(ids[:, layer].flatten().long(), minlength=EXPERTS) for layer in range(LAYERS)]
    return torch.stack(each)


def test_sums_from_start_to_stop(tmp_path: Path) -> None:
    steps = Steps(tmp_path / "new" / "folder")
    steps.run(RecordedRows(0, 0, 5))  # before the start
    steps.recorder.start()
    ids = [steps.run(RecordedRows(0, 5, 1)), steps.run(RecordedRows(0, 6, 1), RecordedRows(1, 0, 7))]
    steps.recorder.stop()
    steps.run(RecordedRows(0, 7, 1))  # after the stop
    record = steps.dumped()
    assert torch.equal(record.counts, counts_of(torch.cat(ids))[None])
    assert (record.mode, record.model, record.passes, record.tokens) == ("stat", "made-up", 2, 9)
    assert record.layers == (0, 2, 5) and record.gpu_experts is None and record.topk_ids is None
    (file,) = (tmp_path / "new" / "folder").iterdir()
    assert file.name.startswith("expert_distribution_recorder_") and file.suffix == ".pt"
    assert torch.equal(load_counts(str(file), LAYERS, EXPERTS), counts_of(torch.cat(ids)).double())


def test_a_dump_begins_anew_and_a_start_forgets(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    steps.recorder.start()
    first = steps.run(RecordedRows(0, 0, 4))
    assert torch.equal(steps.dumped().total, counts_of(first).double())
    second = steps.run(RecordedRows(0, 4, 3))
    assert torch.equal(steps.dumped().total, counts_of(second).double())
    steps.run(RecordedRows(0, 7, 2))
    steps.recorder.start()
    third = steps.run(RecordedRows(0, 9, 6))
    record = steps.dumped()
    assert torch.equal(record.total, counts_of(third).double()) and record.tokens == 6
    assert len(list(tmp_path.iterdir())) == 3


def test_what_cannot_be_done_says_what_to_call(tmp_path: Path) -> None:
    recorder = Steps(tmp_path).recorder
    for refused in (recorder.stop, recorder.dump):
        with pytest.raises(RequestError, match="/start_expert_distribution_record"):
            refused()
    recorder.start()
    recorder.stop()
    with pytest.raises(RequestError):
        recorder.stop()
    recorder.dump().result(120)
    with pytest.raises(RequestError):
        recorder.dump()


@pytest.mark.parametrize("kept", [None, 2])
def test_every_step_and_every_token(tmp_path: Path, kept: int | None) -> None:
    steps = Steps(tmp_path, mode="per_token", last_passes=kept, gpu_experts=True)
    steps.recorder.start()
    ids = [steps.run(RecordedRows(3, 0, 6), RecordedRows(4, 10, 1)), steps.run(RecordedRows(3, 6, 1))]
    steps.run(RecordedRows(3, 7, 1), fail=True)
    before = steps.usage.gpu_experts
    elsewhere = [(layer, e, not before[layer, e]) for layer in range(LAYERS) for e in range(EXPERTS)]
    steps.usage.moved(lambda: elsewhere, 1)
    ids.append(steps.run(RecordedRows(3, 7, 1), RecordedRows(4, 11, 2)))
    record, ids = steps.dumped(), ids[1:] if kept else ids
    assert record.passes == 3 and record.tokens == 11
    assert torch.equal(record.counts, torch.stack([counts_of(each) for each in ids]).int())
    assert torch.equal(record.topk_ids, torch.cat(ids).short())
    cut = 7 if kept else 0
    assert record.pass_tokens.tolist() == [7, 1, 3][1 if kept else 0 :]
    assert record.requests.tolist() == [3, 3, 3, 3, 3, 3, 4, 3, 3, 4, 4][cut:]
    assert record.positions.tolist() == [0, 1, 2, 3, 4, 5, 10, 6, 7, 11, 12][cut:]
    assert torch.equal(record.gpu_experts, torch.stack([before, before, ~before])[1 if kept else 0 :])


def test_steps_without_tokens(tmp_path: Path) -> None:
    steps = Steps(tmp_path, mode="per_pass")
    steps.recorder.start()
    assert steps.dumped().counts.tolist() == torch.zeros(1, LAYERS, EXPERTS).tolist()
    ids = [steps.run(RecordedRows(0, 0, 2)), steps.run(RecordedRows(0, 2, 1))]
    steps.recorder.stop()
    record = steps.dumped()
    assert torch.equal(record.counts, torch.stack([counts_of(each) for each in ids]).int())
    assert record.topk_ids is record.requests is record.gpu_experts is None


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """What a full disk does: a write fails half-way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("mode", ["stat", "per_token"])
def test_a_disk_that_is_full_loses_nothing(tmp_path: Path, mode: str) -> None:
    steps = Steps(tmp_path, mode=mode)
    steps.recorder.start()
    ids = [steps.run(RecordedRows(0, 0, 4))]
    with files_of_at_most(512):
        failed = steps.recorder.dump().exception(120)
    assert isinstance(failed, EngineError) and "--expert-distribution-recorder-dir" in str(failed)
    assert isinstance(failed.__cause__, OSError) and failed.__cause__.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []
    ids.append(steps.run(RecordedRows(0, 4, 2)))
    record = steps.dumped()
    assert torch.equal(record.total, counts_of(torch.cat(ids)).double()) and record.tokens == 6
    assert mode == "stat" or record.positions.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_start_forgets_what_is_still_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, go_on = Steps(tmp_path), Event()

    def hangs(path: Path, record: UsageRecord) -> None:
        assert go_on.wait(120)
        raise OSError(errno.EIO, "the disk is gone")

    steps.recorder.start()
    steps.run(RecordedRows(0, 0, 4))
    monkeypatch.setattr(recorder, "write_usage", hangs)
    writing = steps.recorder.dump()
    steps.recorder.start()
    ids = steps.run(RecordedRows(1, 0, 2))  # goes on meanwhile
    go_on.set()
    assert "the disk is gone" in str(writing.exception(120))
    monkeypatch.undo()
    assert torch.equal(steps.dumped().total, counts_of(ids).double())


def test_a_directory_that_cannot_be_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    recorder = Steps(tmp_path / "file" / "folder").recorder
    with pytest.raises(EngineError, match="cannot be written to .*file/folder"):
        recorder.start()
    assert not recorder.recording


# -- files ---


def test_a_file_keeps_everything(tmp_path: Path) -> None:
    counts = torch.arange(2 * LAYERS * EXPERTS).view(2, LAYERS, EXPERTS) + 2**40
    record = UsageRecord(counts, "per_pass", "m", 5, 6, (1, 2, 3), counts > 7, torch.tensor([2, 3]).int())
    write_usage(tmp_path / "a.pt", record)
    got = read_usage(tmp_path / "a.pt")
    assert torch.equal(got.counts, counts) and torch.equal(got.gpu_experts, counts > 7)
    assert got.layers == (1, 2, 3) and (got.mode, got.tokens, got.passes) == ("per_pass", 5, 6)
    assert [f.name for f in tmp_path.iterdir()] == ["a.pt"]


def test_files_of_sglang(tmp_path: Path) -> None:
    """Its statistics; and its records, of physical experts: here five slots for four experts, one of them twice."""
    counts = torch.randint(9, (6, LAYERS, 4), dtype=torch.int32)
    stat = {"rank": 0, "logical_count": counts, "average_utilization_rate_over_window": None}
    torch.save(stat, tmp_path / "stat.pt")
    assert torch.equal(read_usage(tmp_path / "stat.pt").counts, counts)
    place = torch.tensor([[0, 1, 2, 3, 1], [3, 2, 1, 0, 0], [2, 2, 0, 1, 3]])
    physical = torch.randint(9, (2, LAYERS, 5), dtype=torch.int32)
    records = [
        {"forward_pass_id": i, "rank": 0, "gatherer_key": "primary", "global_physical_count": each}
        for i, each in enumerate(physical)
    ]
    torch.save({"records": records, "last_physical_to_logical_map": place}, tmp_path / "records.pt")
    got = read_usage(tmp_path / "records.pt")
    expected = torch.zeros(2, LAYERS, 4, dtype=torch.int64)
    for i in range(2):
        for layer in range(LAYERS):
            for slot in range(5):
                expected[i, layer, place[layer, slot]] += physical[i, layer, slot]
    assert torch.equal(got.counts, expected)
    torch.save(counts[0], tmp_path / "bare.pt")
    assert torch.equal(read_usage(tmp_path / "bare.pt").counts, counts[:1])


BAD = [
    "text", {"logical_count": "text"}, {"logical_count": torch.zeros(4)}, torch.zeros(0, 3, 4), torch.full((3, 4), -1),
    torch.full((3, 4), torch.nan), {"records": []}, {"records": [{}]}, {"records": [3]}, {},
    {"records": [{"global_physical_count": torch.zeros(3, 5)}], "last_physical_to_logical_map": torch.zeros(3, 4)},
    {"records": [{"global_physical_count": torch.ones(1, 1)}], "last_physical_to_logical_map": -torch.ones(1, 1)},
    {"logical_count": torch.zeros(3, 4), "gpu_experts": torch.zeros(2, 4)}, torch.ones(2, 2, dtype=torch.complex64),
]  # fmt: skip


@pytest.mark.parametrize("stored", BAD, ids=range(len(BAD)))
def test_other_files_are_refused(tmp_path: Path, stored: object) -> None:
    torch.save(stored, tmp_path / "x.pt")
    with pytest.raises(ConfigError, match=r"x\.pt"):
        read_usage(tmp_path / "x.pt")


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04 no zip file", b"text"])
def test_files_that_torch_did_not_write(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_usage(tmp_path / "x.pt")


def test_counts_of_all_decoder_layers_fit_too(tmp_path: Path) -> None:
    """SGLang's files have a row for dense layers as well."""
    counts = torch.arange(5 * EXPERTS).view(5, EXPERTS)
    torch.save(counts, tmp_path / "all.pt")
    got = load_counts(str(tmp_path / "all.pt"), LAYERS, EXPERTS, (1, 3, 4), 5)
    assert torch.equal(got, counts[[1, 3, 4]].double())
    with pytest.raises(ConfigError, match=r"\[5, 7\]; this model has \[3, 7\]"):
        load_counts(str(tmp_path / "all.pt"), LAYERS, EXPERTS, (1, 3, 4), 6)


# -- in the engine ---


@pytest.mark.parametrize("variant", ["glm4_moe", "deepseek_v3"])
def test_the_engine_records_each_token_once(tiny_models, tmp_path: Path, variant: str) -> None:
    engine = tiny_engine(
        tiny_models[variant],
        tmp_path,
        expert_distribution_recorder_mode="per_token",
        disable_radix_cache=True,
    )
    engine.record_experts("start").result(120)
    generate(engine, list(range(20)), [7])
    engine.record_experts("stop").result(120)
    answer = engine.record_experts("dump").result(120)
    record, config = read_usage(answer.file), engine.model_config
    moe, layers = config.moe, config.moe_layers
    assert (answer.recording, answer.mode, answer.tokens) == (False, "per_token", 20 + 5 + 1 + 5)
    assert record.layers == layers and record.model == variant and record.passes == answer.passes
    assert record.topk_ids.shape == (31, len(layers), moe.router.top_k)
    assert record.total.sum(1).tolist() == [31.0 * moe.router.top_k] * len(layers)
    for request, tokens in ((1, 25), (2, 6)):
        assert record.positions[record.requests == request].tolist() == list(range(tokens))
    starts = record.pass_tokens.cumsum(0) - record.pass_tokens
    for counts, first, count in zip(record.counts, starts, record.pass_tokens, strict=True):
        ids = record.topk_ids[first : first + count]
        for layer in range(len(layers)):
            here = torch.bincount(ids[:, layer].flatten().long(), minlength=moe.router.num_experts)
            assert torch.equal(counts[layer].long(), here)


def test_a_dense_model_has_nothing_to_record(tiny_models, tmp_path: Path) -> None:
    engine = tiny_engine(tiny_models["llama"], tmp_path)
    with pytest.raises(RequestError, match="no routed experts"):
        engine.record_experts("start").result(120)


def test_the_directory_comes_from_the_environment_unless_a_flag_says_it(
    tiny_models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR", str(tmp_path / "environment"))
    for flag, name in ((None, "environment"), (str(tmp_path / "flag"), "flag")):
        engine = tiny_engine(tiny_models["mixtral"], tmp_path, expert_distribution_recorder_dir=flag)
        engine.record_experts("start").result(120)
        generate(engine, [1, 2])
        assert Path(engine.record_experts("dump").result(120).file).parent == tmp_path / name
