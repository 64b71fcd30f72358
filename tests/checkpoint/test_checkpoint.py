"""`Checkpoint`: what it reads, and that every broken directory is an error naming file and tensor."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.architectures.load import load_config
from tandem.checkpoint import open_checkpoint, resolve_model
from tandem.checkpoint.mapped.pages import joined
from tandem.checkpoint.mapped.shards import INDEX
from tandem.errors import CheckpointError

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
FIRST = {"a": torch.arange(12.0).view(3, 4), "b": torch.arange(5).to(torch.bfloat16)}
SECOND = {"c": torch.ones(2, 2, dtype=torch.float16)}


@pytest.fixture
def sharded(tmp_path):
    save_file(FIRST, tmp_path / ONE)
    save_file(SECOND, tmp_path / TWO)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": ONE, "b": ONE, "c": TWO}}))
    (tmp_path / "config.json").write_text('{"model_type": "olmoe"}')
    return tmp_path


@pytest.mark.parametrize("with_index", [True, False])
def test_reads_all_shards(sharded, with_index):
    if not with_index:
        (sharded / INDEX).unlink()
    checkpoint = open_checkpoint(sharded)
    assert set(checkpoint.names()) == {"a", "b", "c"}
    for name, tensor in (FIRST | SECOND).items():
        assert checkpoint.get(name).dtype == tensor.dtype
        assert torch.equal(checkpoint.get(name), tensor)
    assert checkpoint.nbytes() == sum(tensor.nbytes for tensor in (FIRST | SECOND).values())


def test_views_are_mapped_and_outlive_what_forgets_them(sharded):
    checkpoint = open_checkpoint(sharded)
    view = checkpoint.get("a")
    assert view.data_ptr() == checkpoint.get("a").data_ptr()
    checkpoint.release()
    assert torch.equal(view, FIRST["a"])
    del checkpoint
    assert torch.equal(view, FIRST["a"])


@pytest.fixture
def layered(tmp_path):
    """Three layers of 16 MiB each."""
    tensors = {
        f"model.layers.{i}.experts.{e}.w": torch.full((1024, 2048), i + e / 8)
        for i in range(3)
        for e in range(2)
    }
    save_file(tensors | {"embed": torch.zeros(4)}, tmp_path / "model.safetensors")
    return tmp_path


def test_a_page_between_two_files_is_not_let_go_of_with_them():
    """It may be anybody's: were it told that nobody needs it, it would become zeros."""
    assert joined([(0x3000, 0x5000), (0x1000, 0x2000)]) == [(0x1000, 0x2000), (0x3000, 0x5000)]
    assert joined([(0x1000, 0x2010), (0x3000, 0x5000)]) == [(0x1000, 0x5000)]  # the first one's last page


def resident_file_bytes() -> int:
    """Mapped file pages that count as this process's memory."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssFile:\s+(\d+)", status)[1])


def test_a_layer_that_was_read_is_let_go_of(layered):
    checkpoint = open_checkpoint(layered)
    gc.collect()  # or files that other tests have mapped go meanwhile
    before = resident_file_bytes()
    for layer in range(3):
        checkpoint.read_ahead(layer + 1)  # the last one does not exist
        views = [checkpoint.get(f"model.layers.{layer}.experts.{e}.w") for e in range(2)]
        assert [view.mean().item() for view in views] == [layer, layer + 1 / 8]
        assert resident_file_bytes() > before + 12 * 2**20  # else the next line tests nothing
        checkpoint.forget(layer)
        checkpoint._pages.wait()
        assert resident_file_bytes() < before + 6 * 2**20
    assert views[1][-1, -1] == 2 + 1 / 8


def test_tensors_that_a_file_does_not_align_are_read(tmp_path):
    a = {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}
    b = {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]}
    header = json.dumps({"a": a, "b": b}).encode()
    data = bytes([1, 2, 3]) + struct.pack("<2f", 0.5, -4.0)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    assert open_checkpoint(tmp_path).get("b").tolist() == [0.5, -4.0]


def test_a_missing_tensor_and_a_wrong_shape_are_named(sharded):
    checkpoint = open_checkpoint(sharded)
    with pytest.raises(CheckpointError, match=r"no tensor lm_head\.weight"):
        checkpoint.get("lm_head.weight")
    with pytest.raises(CheckpointError, match=rf"{ONE}: tensor a has shape \(3, 4\).*\(4, 3\)"):
        checkpoint.get("a", (4, 3))


def test_a_dtype_that_cannot_be_computed_with_is_named(tmp_path):
    save_file({"q": torch.zeros(3, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="tensor q is stored as I8; it is read as BF16 or F16 or F32"):
        open_checkpoint(tmp_path).get("q")


def test_a_missing_shard_is_named(sharded):
    (sharded / TWO).unlink()
    with pytest.raises(CheckpointError, match=f"{TWO} is missing"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
def test_a_truncated_file_is_named(sharded, keep):
    (sharded / ONE).write_bytes((sharded / ONE).read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=f"{ONE} is truncated or not safetensors"):
        open_checkpoint(sharded)


def test_a_tensor_in_two_files_is_named(sharded):
    (sharded / INDEX).unlink()
    save_file({"a": torch.zeros(1)}, sharded / TWO)
    with pytest.raises(CheckpointError, match=f"tensor a is in both {ONE} and {TWO}"):
        open_checkpoint(sharded)


def test_the_index_decides_between_files(sharded):
    """Quantised models reuse shards of the original, which hold tensors that now lie in others."""
    saved, stale = load_file(sharded / TWO), {"a": torch.full((7,), 9.0)}
    save_file(saved | stale, sharded / TWO)
    assert torch.equal(open_checkpoint(sharded).get("a"), load_file(sharded / ONE)["a"])
    assert (
        open_checkpoint(sharded).nbytes()
        == sum(x.nbytes for f in (ONE, TWO) for x in load_file(sharded / f).values()) - 28
    )
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["a"] = TWO
    (sharded / INDEX).write_text(json.dumps(index))
    assert torch.equal(open_checkpoint(sharded).get("a"), stale["a"])


def test_a_tensor_is_read_where_it_lies_whatever_the_index_says(sharded):
    whole = {"weight_map": {"a": TWO, "b": TWO, "c": ONE}}
    (sharded / INDEX).write_text(json.dumps(whole))
    for name, file in {"a": ONE, "b": ONE, "c": TWO}.items():
        assert torch.equal(open_checkpoint(sharded).get(name), load_file(sharded / file)[name])


def test_a_tensor_in_two_files_that_the_index_does_not_name_is_refused(sharded):
    for file in (ONE, TWO):
        save_file(load_file(sharded / file) | {"d": torch.zeros(1)}, sharded / file)
    with pytest.raises(CheckpointError, match=f"tensor d is in both {ONE} and {TWO}"):
        open_checkpoint(sharded)


def test_an_index_that_promises_more_than_the_file_has_is_refused(sharded):
    (sharded / INDEX).write_text(json.dumps({"weight_map": {"a": ONE, "b": ONE, "c": TWO, "d": TWO}}))
    with pytest.raises(CheckpointError, match=f"{TWO} lacks tensor d"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": {}}', '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_a_broken_index_is_refused(sharded, index):
    (sharded / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match=INDEX):
        open_checkpoint(sharded)


def test_directories_without_a_model_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="holds no .*safetensors"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="not a directory"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load_config(tmp_path)


def test_what_a_user_types_is_resolved(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path / "cache"))
    assert resolve_model("demo") == tmp_path / "cache" / "demo"
    assert resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(CheckpointError, match="kt model pull Qwen/Qwen3-30B-A3B"):
        resolve_model("Qwen/Qwen3-30B-A3B")
    with pytest.raises(CheckpointError, match="does not exist"):
        resolve_model(str(tmp_path / "absent"))
    (tmp_path / "model.bin").touch()
    with pytest.raises(CheckpointError, match="is not GGUF: give a GGUF file, or the directory"):
        resolve_model(str(tmp_path / "model.bin"))


def test_a_shard_of_a_real_model_that_lost_its_end_stops_the_load(tiny_models, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(tiny_models["olmoe"], copy)
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        open_checkpoint(copy)


def test_a_file_larger_than_memory_is_mapped(tmp_path):
    """A writable private mapping of it would be refused as memory that is not there."""
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    swap = int(re.search(r"SwapTotal:\s+(\d+)", Path("/proc/meminfo").read_text())[1]) << 10
    columns = 1 << 20
    rows = 3 * (ram + swap) // (2 * columns)
    header = json.dumps({"big.weight": {"dtype": "BF16", "shape": [rows, columns],
                                        "data_offsets": [0, 2 * rows * columns]}}).encode()  # fmt: skip
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * rows * columns)  # a hole, which takes no disk
    found = open_checkpoint(tmp_path)
    assert found.get("big.weight")[-1, -3:].tolist() == [0, 0, 0]
    assert found.nbytes() > ram + swap


def test_a_name_that_is_not_utf_8_is_refused(tmp_path):
    """Processes tell each other the model's path as JSON and in messages."""
    path = Path(os.fsdecode(os.fsencode(str(tmp_path)) + b"/model\xff"))
    path.mkdir()
    with pytest.raises(CheckpointError, match=r"model\\udcff' is no name in UTF-8.*rename it, or link it"):
        resolve_model(path)
