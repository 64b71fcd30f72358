"""Tables that are read by row: the same rows from memory, files and disk; what is planned; files that are cut short."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fake_model import request, run
from plans import machine
from recorded_steps import tiny_engine
from tandem import _core
from tandem.architectures.load import load_config
from tandem.bench.architectures import named_config
from tandem.checkpoint import load_model_config, open_checkpoint
from tandem.checkpoint.metadata.from_names import formats_from_names
from tandem.checkpoint.parts import is_table
from tandem.checkpoint.tables import readers
from tandem.checkpoint.tables.readers import TableRows
from tandem.convert import Conversion, convert
from tandem.engine.engine import Engine
from tandem.engine.protocol import GenerateRequest
from tandem.errors import CheckpointError, KernelError
from tandem.flags.engine_config import EngineConfig
from tandem.planner.forecast.advice import PlanQuestion
from tandem.planner.forecast.machine_spec import MachineWish, wished_speeds
from tandem.planner.forecast.report import report
from tandem.planner.forecast.speeds import Speeds
from tandem.planner.memory import GIB
from tandem.planner.resolve import resolve
from tandem.spec.stored import StoredFormats
from tiny import file_tensors

WAYS = ["ram", "map", "disk"]
MODULE = "model.layers.1.ple.ple_embedding.ngram_embedding"
ROWS, WIDTH = 3000, 160


@pytest.fixture(scope="module")
def numbers() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2))


def saved(path: Path, numbers: Tensor, shards: int, scale: float | None = None) -> Path:
    """Parts of a table in files of their own, beside a tensor of an odd size: rows lie at odd places. scale: of fp8."""
    path.mkdir()
    parts = numbers.chunk(shards)
    for i, part in enumerate(parts):
        stored = part.clone() if scale is None else (part / scale).to(torch.float8_e4m3fn)
        name = f"{MODULE}.shard_{i}.weight" if shards > 1 else f"{MODULE}.weight"
        odd = torch.zeros(7 + 2 * i, dtype=torch.uint8)
        save_file({f"a.odd{i}": odd, name: stored}, path / f"part-{i}.safetensors")
    if scale is not None:
        save_file({f"{MODULE}.weight_scale": torch.tensor([scale]).bfloat16()}, path / "scale.safetensors")
    (path / "config.json").write_text("{}")
    return path


def asked(count: int = 400) -> Tensor:
    """Some twice, the first and the last, and rows across every border of 4 KiB."""
    some = torch.randint(ROWS, (count,), generator=torch.Generator().manual_seed(3))
    borders = torch.arange(ROWS)[torch.arange(ROWS) * WIDTH * 2 // 4096 != (torch.arange(ROWS) + 1) * WIDTH * 2 // 4096]
    return torch.cat((some, some[:9], torch.tensor([0, ROWS - 1]), borders))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("dtype", "shards"), [(torch.bfloat16, 5), (torch.float32, 1), (torch.float16, 3)])
def test_rows_are_the_same_from_everywhere(tmp_path: Path, numbers, way: str, dtype: torch.dtype, shards: int) -> None:
    stored = numbers.to(dtype)
    read = _table(saved(tmp_path / "m", stored, shards), way)
    rows = read(asked())
    assert rows.dtype == dtype and torch.equal(rows, stored[asked()])
    assert read(asked()[:0]).shape == (0, WIDTH) and torch.equal(read(torch.tensor([7])), stored[7:8])


@pytest.mark.parametrize("way", WAYS)
def test_codes_are_their_numbers_times_one_scale(tmp_path: Path, numbers, way: str) -> None:
    scale = 0.0078125 * 1.5
    stored = (numbers / scale).to(torch.float8_e4m3fn)
    rows = _table(saved(tmp_path / "m", numbers, 4, scale), way)(asked())
    assert torch.equal(rows, stored[asked()].float() * scale)
    assert open_checkpoint(tmp_path / "m").formats().tables.bytes_per_weight == 1.0


@pytest.mark.parametrize("way", WAYS)
def test_many_rows_are_shared_among_threads(tmp_path: Path, numbers, way: str) -> None:
    read = _table(saved(tmp_path / "m", numbers, 3), way)
    many = torch.randint(ROWS, (5000,), generator=torch.Generator().manual_seed(4))
    assert torch.equal(read(many), numbers[many])


@pytest.mark.parametrize("way", WAYS)
def test_rows_that_were_read_ahead_are_the_same(tmp_path: Path, numbers, way: str) -> None:
    """At once, while they are read, or later; some of them, others, and again."""
    read = _table(saved(tmp_path / "m", numbers, 3), way)
    for count in (3, 400, 2500):
        some = torch.randint(ROWS, (count,), generator=torch.Generator().manual_seed(count))
        read.read_ahead(some)
        assert torch.equal(read(asked()), numbers[asked()])
        for _ in range(2):
            assert torch.equal(read(some), numbers[some])
    with pytest.raises(CheckpointError, match=f"has {ROWS} rows, and one beyond them"):
        read(torch.tensor([ROWS]))


@pytest.mark.parametrize("way", WAYS)
def test_rows_of_a_step_are_those_of_its_numbers(tmp_path: Path, numbers, way: str) -> None:
    """In one call; of one token, and of so many that threads share them."""
    read = _table(saved(tmp_path / "m", numbers, 3), way)
    hashes = _core.RowNumbers(2, 2, 9, [3, 5], [700, 2000], [0, 1000])
    for count in (1, 700):
        ids, positions, starts = torch.arange(count) * 7, torch.arange(count), torch.tensor([0, count]).int()
        which, out = torch.empty(count, 2, dtype=torch.int64), torch.empty(count * 2 * WIDTH * 4 + 9, dtype=torch.uint8)
        step = ids, positions, torch.tensor([1]).int(), starts
        assert hashes.find(*step, which) == count == read.read_step(hashes, *step, out)
        rows = out[:-9].view(torch.float32).view(-1, WIDTH)
        assert torch.equal(rows, numbers[which.flatten()]) and len(set(which.flatten().tolist())) > count // 2
    with pytest.raises(KernelError, match="out has too few bytes"):
        read.read_step(hashes, *step, out[:-10])


@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_cannot_be_read_is_not_found_again(tmp_path: Path, numbers, way: str) -> None:
    """Its tokens are kept by then, and a text longer than what is kept of it would begin with its own end."""
    read = _table(saved(tmp_path / "m", numbers, 3), way)
    sizes, offsets = [700, 9000, 600, 8000], [0, ROWS, 0, ROWS]
    hashes, others = (_core.RowNumbers(3, 2, 9, [3, 5, 7], sizes, offsets) for _ in range(2))
    expected, last = (torch.empty(512, 4, dtype=torch.int64) for _ in range(2))
    out = torch.empty(512 * 4 * WIDTH * 4, dtype=torch.uint8)
    for first in (0, 512):
        at = torch.arange(first, first + 512)
        step = at * 11, at, torch.tensor([1]).int(), torch.tensor([0, 512]).int()
        assert others.find(*step, expected) == 512
        with pytest.raises(CheckpointError, match="one beyond them"):
            read.read_step(hashes, *step, out)
        assert hashes.last(last) == 512 and torch.equal(last, expected)


def test_nobody_waits_for_rows_that_were_read_ahead(tmp_path: Path, numbers) -> None:
    read = _table(saved(tmp_path / "m", numbers, 3), "disk")
    read.read_ahead(torch.arange(40))
    wait_for(lambda: read.reader.ahead == 40)
    assert torch.equal(read(torch.arange(45)), numbers[:45]) and read.reader.waited == 5
    assert torch.equal(read(torch.arange(45)), numbers[:45]) and read.reader.waited == 50  # what was taken is gone


def wait_for(ended: Callable[[], bool]) -> None:
    while not ended():
        time.sleep(0.001)


def _table(path: Path, way: str):
    try:
        return open_checkpoint(path).table(MODULE, (ROWS, WIDTH), way)
    except CheckpointError as error:
        if way == "disk" and "reads past the page cache" in str(error):
            pytest.skip("this file system has no direct reads")
        raise


@pytest.mark.parametrize(("change", "message"), [
    ({"shape": (ROWS + 1, WIDTH)}, f"ends a table of {ROWS} rows, but config.json implies {ROWS + 1}"),
    ({"shape": (ROWS, 80)}, "config.json implies rows of 80"), ({"module": "x.ngram_embedding"}, "has no tensor x"),
    ({"without": 1}, r"has no tensor .*shard_1\.weight"),
])  # fmt: skip
def test_what_does_not_fit_is_named(tmp_path: Path, numbers, change: dict, message: str) -> None:
    path = saved(tmp_path / "m", numbers, 4)
    if "without" in change:
        (path / f"part-{change['without']}.safetensors").unlink()
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path).table(change.get("module", MODULE), change.get("shape", (ROWS, WIDTH)))


def test_codes_without_a_scale_are_named(tmp_path: Path, numbers) -> None:
    path = saved(tmp_path / "m", numbers, 2, 0.01)
    (path / "scale.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"stored as F8_E4M3, but .*weight_scale is missing"):
        _table(path, "map")


@pytest.mark.parametrize("way", WAYS[1:])
def test_a_file_that_is_cut_short_meanwhile_is_named(tmp_path: Path, numbers, way: str) -> None:
    """Rows of other files are still read, and so are those before the cut."""
    path = saved(tmp_path / "m", numbers, 3)
    read = _table(path, way)
    os.truncate(path / "part-1.safetensors", 8192)
    with pytest.raises(CheckpointError, match=r"part-1\.safetensors: rows of .* cannot be read: it was cut short"):
        read(torch.tensor([5, 1900, 2900]))
    assert torch.equal(read(torch.tensor([5, 2900, 1000])), numbers[[5, 2900, 1000]])


@pytest.fixture
def broken_disk() -> Iterator[Callable[[TableRows, int], None]]:
    """Reads of a table's file fail from now on: it becomes this process's memory, whose first pages nobody has."""
    memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    yield lambda table, file: void(os.dup2(memory, table.reader._files.open[file], inheritable=False))
    os.close(memory)


def void(_: object) -> None: ...


@pytest.mark.parametrize("way", WAYS[1:])
def test_a_disk_that_fails_is_named(tmp_path: Path, numbers, way: str, broken_disk) -> None:
    """Rows of other files are still read. The system does not tell what it has of such a file in its cache."""
    read = _table(saved(tmp_path / "m", numbers, 3), way)
    broken_disk(read, 1)
    with pytest.raises(CheckpointError, match=r"part-1\.safetensors: rows of .* cannot be read: Input/output error"):
        read(torch.tensor([5, 1900, 2900]))
    read.read_ahead(torch.tensor([1901, 1902]))  # nobody learns of it before somebody needs one
    assert torch.equal(read(asked()[asked() < 1000]), numbers[asked()[asked() < 1000]])
    with pytest.raises(CheckpointError, match=r"part-1\.safetensors.*Input/output error"):
        read(torch.arange(1500, 1500 + 400))


def test_rows_that_are_not_there_are_no_neighbours_bytes(tmp_path: Path, numbers) -> None:
    read = _table(saved(tmp_path / "m", numbers, 2), "map")
    for wrong in (-1, ROWS):
        with pytest.raises(CheckpointError, match=f"has {ROWS} rows, and one beyond them"):
            read(torch.tensor([3, wrong]))


# -- as served ---


@pytest.mark.parametrize("way", WAYS)
def test_answers_are_the_same_from_everywhere(tiny_models, tmp_path: Path, way: str) -> None:
    prompts = {"a": [7, 8, 9, 7, 8], "b": [40] * 20}
    engines = [tiny_engine(tiny_models["qwen4_exp"], tmp_path, tables=each) for each in ("auto", way)]
    asks = [request(name, prompt, max_tokens=12, ignore_eos=True) for name, prompt in prompts.items()]
    first, other = (run(engine, *asks) for engine in engines)
    assert {key: [o.token_ids for o in each] for key, each in first.items()} == {
        key: [o.token_ids for o in each] for key, each in other.items()
    }
    assert engines[0].plan.tables == "ram" and engines[1].plan.tables == way


def test_a_table_that_is_cut_short_fails_answers_and_not_the_engine(tiny_models, tmp_path: Path) -> None:
    """Whole again, the next answers come."""
    path = tmp_path / "m"
    path.mkdir()
    for file in tiny_models["qwen4_exp"].iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    tables = {name: tensor for name, tensor in file_tensors(path).items() if ".ngram_embedding." in name}
    others = {name: tensor for name, tensor in file_tensors(path).items() if name not in tables}
    for old in path.glob("*.safetensors*"):
        old.unlink()
    save_file(others, path / "model.safetensors", {"format": "pt"})
    save_file(tables, path / "tables.safetensors", {"format": "pt"})
    engine = tiny_engine(path, tmp_path, tables="map")
    whole, ask = (path / "tables.safetensors").read_bytes(), {"max_tokens": 6, "ignore_eos": True}
    before = run(engine, request("a", [7, 8, 9], **ask))
    os.truncate(path / "tables.safetensors", len(whole) // 8)
    failed = run(engine, request("b", [70, 80, 90, 100, 110], **ask))
    ended = next(iter(failed.values()))[-1]
    assert ended.finish_reason == "error"
    assert "tables.safetensors" in str(ended.error) and "cut short" in str(ended.error)
    (path / "tables.safetensors").write_bytes(whole)  # the same file, written again
    after = run(engine, request("c", [7, 8, 9], **ask))
    told = [[token for o in outputs for token in o.token_ids] for outputs in (*before.values(), *after.values())]
    assert told[0] == told[1] and len(told[0]) == 6


class BadRows:
    """Notes rows that are read, and fails for those that are bad."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.noted, self.bad = set[int](), set[int]()
        monkeypatch.setattr(readers.TableRows, "__call__", self._replacement(readers.TableRows.__call__))

    def _replacement(self, real: Callable[[TableRows, Tensor], Tensor]) -> Callable[[TableRows, Tensor], Tensor]:
        def read(table: TableRows, numbers: Tensor) -> Tensor:
            own = set(numbers.tolist())
            if own & self.bad:
                raise CheckpointError("t.safetensors: rows cannot be read: Input/output error")
            self.noted |= own
            return real(table, numbers)

        return read

    def of(self, engine: Engine, *requests: GenerateRequest) -> set[int]:
        """Rows that these requests read."""
        self.noted.clear()
        run(engine, *requests)
        return set(self.noted)


def test_a_row_that_cannot_be_read_fails_those_who_need_it(tiny_models, tmp_path: Path, monkeypatch) -> None:
    """Two answers of the same steps: one reads rows that fail, the other does not."""
    rows, engine = BadRows(monkeypatch), tiny_engine(tiny_models["qwen4_exp"], tmp_path, tables="map")
    prompts = {"a": [7, 8, 9], "b": [70, 80, 90, 100, 110]}

    def ask(name: str) -> GenerateRequest:
        return request(name, prompts[name[0]], max_tokens=6, ignore_eos=True)

    first = run(engine, ask("a"))
    rows.bad = rows.of(engine, ask("b")) - rows.of(engine, ask("a1"))
    assert rows.bad
    both = run(engine, ask("a2"), ask("b2"))
    texts = {key: [t for o in outputs for t in o.token_ids] for key, outputs in {**first, **both}.items()}
    ended = {str(key): outputs[-1] for key, outputs in both.items()}
    names = {str(key): key for key in both}
    a, b = (next(name for name in names if f"{each}2" in name) for each in "ab")
    assert ended[b].finish_reason == "error" and "Input/output error" in str(ended[b].error)
    assert ended[a].finish_reason == "length" and texts[names[a]] == texts[next(iter(first))]


@pytest.mark.parametrize("aborted", [False, True])
def test_pages_of_rows_that_could_not_be_read_are_not_kept(tiny_models, tmp_path: Path, monkeypatch, aborted) -> None:
    """A long prompt whose first chunk reads bad rows, ended by its client or by itself; the disk is whole again."""
    rows = BadRows(monkeypatch)
    limits = {"page_size": 4}
    engine = tiny_engine(tiny_models["qwen4_exp"], tmp_path, tables="map", **limits)
    prompt = [(7 * i) % 50 + 6 for i in range(48)]

    def ask(name: str) -> GenerateRequest:
        return request(name, prompt, max_tokens=4, ignore_eos=True)

    fresh = tiny_engine(tiny_models["qwen4_exp"], tmp_path, tables="map", **limits)
    expected = [t for outputs in run(fresh, ask("x")).values() for o in outputs for t in o.token_ids]
    rows.bad = rows.of(fresh, request("p", prompt[:4], max_tokens=1))
    engine.add(ask("a"))
    outputs = engine.step()
    if aborted:
        engine.abort("a")
    while engine.has_work():
        outputs += engine.step()
    assert outputs[-1].finish_reason == "error" and "Input/output error" in str(outputs[-1].error)
    rows.bad.clear()
    (again,) = run(engine, ask("b")).values()
    assert [t for o in again for t in o.token_ids] == expected and again[0].cached_tokens == 0


@pytest.mark.parametrize(("way", "answers"), [("disk", True), ("map", False), ("ram", False)])
def test_rows_of_tokens_that_come_next_are_read_ahead(tiny_models, tmp_path: Path, monkeypatch, way, answers) -> None:
    """All but those of a prompt's first chunk, which ends at a page's border."""
    rows, prompt, ahead = BadRows(monkeypatch), [(7 * i) % 50 + 6 for i in range(40)], set[int]()
    engine, other = (tiny_engine(tiny_models["qwen4_exp"], tmp_path, tables=way) for _ in range(2))
    first = rows.of(other, request("first", prompt[: other.plan.page_size * 2], max_tokens=1))
    assert (engine._rows_ahead is None) == (way == "ram")
    for operator in engine._rows_ahead._operators if engine._rows_ahead is not None else ():
        operator._find.read_ahead = lambda numbers: ahead.update(numbers.tolist())
    of_prompt = rows.of(engine, request("prompt", prompt, max_tokens=1))
    assert way == "ram" or of_prompt - first <= ahead
    of_both = rows.of(engine, request("both", prompt, max_tokens=6, ignore_eos=True))
    assert (of_both - first <= ahead) == answers and of_both - of_prompt


# -- as planned ---


def planned(memory: float, **flags):
    model = named_config("qwen3.8-flash-next", None)
    return resolve(EngineConfig.from_keywords("m", kt_method="INT4", **flags), model, machine(free=int(memory * GIB)))


def test_a_table_is_in_memory_where_it_fits_beside_experts() -> None:
    """95.4 GiB, in bfloat16; experts in 4 bits are 64, and 12 more is what every token uses."""
    large, small = planned(300), planned(120)
    assert large.tables == "ram" and small.tables == "map"
    (ledger,), (less,) = large.ledgers, small.ledgers
    assert {e.name: e.nbytes for e in ledger.entries}["tables"] == 320_001_536 * 160 * 2
    assert not any(e.name == "tables" for e in less.entries)
    said = {d.name: (d.value, d.reason) for d in large.decisions}
    assert said["tables"][0] == "95.4 GiB in memory"
    said = {d.name: (d.value, d.reason) for d in small.decisions}
    assert said["tables"] == (
        "95.4 GiB in files, of which the page cache keeps what is read",
        "memory is short; n-grams, a few rows of which each token reads",
    )


def test_a_place_that_was_asked_for_is_taken_or_refused() -> None:
    assert planned(300, tables="disk").tables == "disk" and planned(300, tables="map").tables == "map"
    with pytest.raises(Exception, match="--tables map leaves tables in their files"):
        planned(120, tables="ram")


def test_what_a_machine_lacks_is_counted_without_tables() -> None:
    host = machine(free=int(100 * GIB))
    asked = EngineConfig.from_keywords("m"), named_config("qwen3.8-flash-next", None), host, StoredFormats()
    speeds = Speeds().having("measured", dram_gbps=50.0, cpu_flops=1e12)
    found = report("m", PlanQuestion(*asked, wished_speeds(MachineWish(), host, speeds)))
    (ledger,) = found.ledgers
    assert not found.fits and not any(entry.name == "tables" for entry in ledger.entries)


def test_the_flag_changes_nothing_without_tables(tiny_models) -> None:
    config = EngineConfig.from_keywords("m", tables="disk")
    plan = resolve(config, load_config(tiny_models["qwen3_moe"]), machine())
    assert any("--tables disk changes nothing" in notice for notice in plan.notices)


def test_matrices_are_planned_as_if_there_were_no_table(tiny_models) -> None:
    """51 of 176 billion weights would decide what the others are stored as; they are counted apart."""
    path = tiny_models["qwen4_exp"]
    stored = open_checkpoint(path).formats()
    assert stored.dense.bytes_per_weight == 4.0 and stored.tables.bytes_per_weight == 4.0
    total = sum(tensor.nbytes for name, tensor in file_tensors(path).items() if ".ngram_embedding." not in name)
    assert open_checkpoint(path).nbytes() == total


def test_before_a_download_a_table_is_what_names_say(tmp_path: Path) -> None:
    names = [f"{MODULE}.shard_{i}.weight" for i in range(128)]
    config = json.loads(json.dumps({"model_type": "qwen4_exp", "quantization_config": {
        "quant_method": "fp8", "weight_block_size": [128, 128]}}))  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = named_config("qwen3.8-flash-next", None)
    for scale, each in ((f"{MODULE}.weight_scale", 1.0), ("other", 2.0)):
        index = {"metadata": {}, "weight_map": dict.fromkeys([*names, scale], "x.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        assert formats_from_names(tmp_path, model).tables.bytes_per_weight == each


def test_a_layer_is_read_ahead_without_its_table(tiny_models) -> None:
    pages = open_checkpoint(tiny_models["qwen4_exp"])._pages
    assert not any("ngram_embedding." in name for names in pages._layers.values() for name in names)
    assert load_model_config(tiny_models["qwen4_exp"]).tables


def test_a_table_of_unknown_numbers_is_refused_by_name(tmp_path: Path, numbers) -> None:
    """Already where the planner asks what it is stored as."""
    path = saved(tmp_path / "m", numbers.view(torch.int32).to(torch.uint16), 2)
    with pytest.raises(CheckpointError, match=r"shard_0\.weight.* is stored as U16; a table is read as one of BF16"):
        open_checkpoint(path).formats()


@pytest.mark.parametrize("dense", [False, True])
def test_a_conversion_copies_tables_as_they_are(tiny_models, tmp_path: Path, dense: bool) -> None:
    source = tiny_models["qwen4_exp"]
    convert(Conversion(source, tmp_path / "out", "FP8", dense=dense))
    before, after = file_tensors(source), file_tensors(tmp_path / "out")
    tables = [name for name in before if is_table(name) and name.endswith(".weight")]
    assert tables and all(torch.equal(before[name], after[name]) for name in tables)
    assert any(name not in after for name in before), "experts were converted"
