"""What `--models` reads: a TOML file, or a directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.server.front.models_file import read_models, words


def read(path: Path, *flags: str):
    return read_models(EngineConfig.from_args(["--models", str(path), *flags]))


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "models.toml"
    path.write_text(text)
    return path


def test_a_file(tmp_path: Path):
    (tmp_path / "qwen").mkdir()
    text = """
stay_seconds = 5
max_loaded = 3
sleep_idle_seconds = 600
[models.qwen]
model = "qwen"
kt-method = "INT4"
context_length = 4096
disable-radix-cache = true
aliases = ["gpt-4o"]
preload = true
[models.demo]
model = "demo"
sleep_idle_seconds = -1
"""
    file = read(toml(tmp_path, text), "--kt-cpuinfer", "2", "--port", "0", "--context-length", "512")
    assert (file.stay_seconds, file.max_loaded) == (5, 3)
    qwen, demo = file.entries
    assert qwen.flags[:2] == ("--model", str(tmp_path / "qwen")) and demo.flags[:2] == ("--model", "demo")
    assert set(zip(qwen.flags[2::2], qwen.flags[3::2], strict=False)) >= {("--kt-cpuinfer", "2")}
    assert "--disable-radix-cache" in qwen.flags and "--port" not in qwen.flags
    config = EngineConfig.from_args(qwen.flags)
    assert (config.kt_method, config.context_length, config.kt_cpuinfer) == ("INT4", 4096, 2)
    assert (qwen.aliases, qwen.preload, qwen.sleep_idle_seconds) == (("gpt-4o",), True, 600)
    assert demo.sleep_idle_seconds == -1 and EngineConfig.from_args(demo.flags).context_length == 512


def test_a_directory(tmp_path: Path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    for name in ("two.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf", "notes.txt"):
        (tmp_path / name).touch()
    file = read(tmp_path, "--sleep-idle-seconds", "60")
    assert [entry.name for entry in file.entries] == ["one", "two", "big"]
    assert {entry.sleep_idle_seconds for entry in file.entries} == {60}
    assert file.entries[2].path == str(tmp_path / "big-00001-of-00002.gguf")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no model"), ("[models]", "names no model"), ("models = 5", "names no model"),
        ("[", "cannot be read"),
        ("[models.a]\n", r"\[models.a\] has no model"), ("[models.a]\nmodel = 5", "has no model"),
        ('[models.a]\nmodel = "m"\nport = 5', "port is the server's own"),
        ('[models.a]\nmodel = "m"\ntp = 2\ntp-size = 4', "--tensor-parallel-size is given twice, as 2 and as 4"),
        ('[models.a]\nmodel = "m"\naliases = "x"', "aliases must be a list"),
        ('[models.a]\nmodel = "m"\ncontxt-length = 5', "--context-length"),
        ('[models.a]\nmodel = "m"\ncontext-length = "x"', "--context-length"),
        ('most = 5\n[models.a]\nmodel = "m"', "'most' is not known"),
        ('max_loaded = "x"\n[models.a]\nmodel = "m"', "max_loaded must be a number"),
        ('[models.a]\nmodel = "m"\n[models.b]\nmodel = "n"\naliases = ["a"]', "both called 'a'"),
    ],
)  # fmt: skip
def test_a_wrong_file(tmp_path: Path, text: str, said: str):
    with pytest.raises(ConfigError, match=said):
        read(toml(tmp_path, text))


def test_a_model_has_its_own_value_by_any_name_of_a_flag(tmp_path: Path):
    path = toml(tmp_path, '[models.a]\nmodel = "m"\ntp = 2\nspared_multiprocessors = 8')
    (entry,) = read(path, "--tensor-parallel-size", "4", "--prefill-reserved-sms", "16").entries
    config = EngineConfig.from_args(entry.flags)
    assert (config.tensor_parallel_size, config.prefill_reserved_sms) == (2, 8)


def test_nothing_there(tmp_path: Path):
    with pytest.raises(ConfigError, match="has no model"):
        read(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read(tmp_path / "no.toml")
    with pytest.raises(ConfigError, match="give one"):
        EngineConfig.from_args(["demo", "--models", "x"])


def test_words():
    assert words({"a_b": True, "c": False, "d": None, "model": "m", "kt_numa_nodes": (0, 1)}) == (
        "--model", "m", "--a-b", "--kt-numa-nodes", "0", "1",
    )  # fmt: skip
