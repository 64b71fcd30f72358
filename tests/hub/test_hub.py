"""Models by name, from a hub of our own: fetched, resumed, checked, refused, found again; and what is never asked."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from typer.testing import CliRunner, Result

from gguf_files import split, write_gguf
from hub_server import COMMIT, FakeHub, serving
from tandem import LLM, SamplingParams
from tandem.checkpoint import resolve_model
from tandem.cli import prepare
from tandem.cli.app import app
from tandem.cli.serve import all_is_here
from tandem.engine.start import model_files
from tandem.errors import CheckpointError, ConfigError, HubError
from tandem.flags.engine_config import EngineConfig
from tandem.hub import download, remote
from tandem.hub.files import INDEX, gguf_variants, variant_of
from tandem.hub.names import HubName, hub_name, shown_name
from tandem.hub.snapshot import find_snapshot
from tandem.hub.store import kept_models
from tandem.machine.machine import Machine
from tiny import save_tiny

NAME = "tiny/Qwen3-Tiny"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A model directory in two shards, with files that nobody needs."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("source")
    save_tiny("qwen3_moe", folder / "whole")
    model = AutoModelForCausalLM.from_pretrained(folder / "whole", dtype="float32")
    model.save_pretrained(folder / "model", max_shard_size="250KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / "whole" / name, folder / "model")
    (folder / "model" / "README.md").write_text("read me")
    (folder / "model" / "modeling_tiny.py").write_text("raise SystemExit")
    (folder / "model" / "original").mkdir()
    (folder / "model" / "original" / "consolidated.safetensors").write_bytes(b"x" * 1000)
    return folder / "model"


@pytest.fixture
def hub(source, tmp_path, monkeypatch) -> Iterator[FakeHub]:
    with serving(FakeHub()) as fake:
        fake.add(NAME, source)
        monkeypatch.setattr(constants, "ENDPOINT", fake.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
        monkeypatch.setattr(remote, "FIRST_PAUSE_SECONDS", 0.01)
        yield fake


def kt(*argv: str) -> Result:
    return CliRunner().invoke(app, list(argv), env={"COLUMNS": "200", "TERM": "dumb"})


def shards_of(hub: FakeHub) -> list[str]:
    return sorted(name for name in hub.repos[NAME] if name.startswith("model-"))


def same_files(path: Path, source: Path) -> bool:
    return all((path / file.name).read_bytes() == file.read_bytes() for file in source.glob("*.safetensors"))


def test_only_the_needed_files_are_fetched_and_once(hub, source):
    path = model_files.fetch(HubName(NAME))
    assert same_files(path, source) and path.name == COMMIT
    wanted = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
              "model.safetensors.index.json", *shards_of(hub)}  # fmt: skip
    assert sorted(hub.fetched()) == sorted(wanted) == sorted(file.name for file in path.iterdir())
    asked = len(hub.asked)
    assert model_files.fetch(HubName(NAME)) == path == resolve_model(NAME)
    assert len(hub.asked) == asked  # what is whole is not asked for again
    assert huggingface_hub.try_to_load_from_cache(NAME, "config.json", constants.HF_HUB_CACHE) == str(
        path / "config.json"
    )


def test_an_answer_comes_from_a_name(hub):
    llm = LLM(NAME, max_total_tokens=128, kt_cpuinfer=1)
    assert len(llm.generate(["Hello"], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4


def test_files_that_other_programs_fetched_are_found(hub, source, monkeypatch):
    """As huggingface_hub lays them out."""
    repo = Path(constants.HF_HUB_CACHE) / "models--tiny--Other"
    shutil.copytree(source, repo / "snapshots" / COMMIT)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert model_files.fetch(HubName("tiny/Other")) == repo / "snapshots" / COMMIT
    assert hub.asked == []
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set: unset it, or give a directory"):
        model_files.fetch(HubName(NAME))
    (repo / "snapshots" / COMMIT / shards_of(hub)[0]).unlink()
    with pytest.raises(HubError, match=r"lacks model-00001-of.*kt model pull tiny/Other"):
        resolve_model("tiny/Other")


def test_an_interrupted_file_goes_on_where_it_was(hub, source, monkeypatch):
    first = shards_of(hub)[0]
    monkeypatch.setattr(remote, "TRIES", 1)
    hub.cut_at[first] = 100_000
    with pytest.raises(HubError, match=r"0 of 0 MB are here, and the same command goes on|cannot be fetched"):
        model_files.fetch(HubName(NAME))
    assert resolve_error(NAME) == f"{NAME} is no directory here"
    path = model_files.fetch(HubName(NAME))
    assert same_files(path, source)
    assert [wish for name, wish in hub.asked if name.endswith(first)] == ["", "bytes=100000-"]


def resolve_error(name: str) -> str:
    with pytest.raises(HubError) as refused:
        resolve_model(name)
    return str(refused.value).split(",")[0]


def test_connections_that_end_early_are_tried_again(hub, source):
    hub.busy = 2
    for name in shards_of(hub):
        hub.cut_at[name] = 70_000
    assert same_files(model_files.fetch(HubName(NAME)), source)


def test_a_server_without_ranges_sends_it_all_again(hub, source):
    hub.ranges = False
    hub.cut_at[shards_of(hub)[0]] = 70_000
    assert same_files(model_files.fetch(HubName(NAME)), source)


def test_what_has_its_name_is_on_the_disk(hub, monkeypatch):
    """Or a power failure would leave files of zeros that nobody looks at again."""
    synced, fsync = set[int](), os.fsync

    def remember(file: int) -> None:
        synced.add(os.fstat(file).st_ino)
        fsync(file)

    monkeypatch.setattr(os, "fsync", remember)
    path = model_files.fetch(HubName(NAME))
    assert {file.stat().st_ino for file in path.iterdir()} <= synced


def test_copies_are_whole_where_there_are_no_links(hub, source, monkeypatch):
    def no_links(link: Path, target: str) -> None:
        raise PermissionError(1, "Operation not permitted")

    def full(blob: Path, copy: Path) -> None:
        copy.write_bytes(blob.read_bytes()[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "symlink_to", no_links)
    with monkeypatch.context() as patch, pytest.raises(HubError, match="No space left"):
        patch.setattr(shutil, "copyfile", full)
        model_files.fetch(HubName(NAME))
    path = model_files.fetch(HubName(NAME))
    assert all(file.read_bytes() == (source / file.name).read_bytes() for file in path.iterdir())


def test_wrong_bytes_are_said_and_fetched_again(hub, source, capfd):
    name = shards_of(hub)[1]
    hub.corrupt[name] = 1
    assert same_files(model_files.fetch(HubName(NAME)), source)
    assert f"{name} came with wrong bytes (its checksum differs); fetching it again" in capfd.readouterr().err
    assert hub.fetched(name) == [name, name]


def test_bytes_that_stay_wrong_are_an_error(hub, tmp_path):
    hub.corrupt["config.json"] = 9
    with pytest.raises(
        HubError, match=r"config.json of tiny/Qwen3-Tiny came with wrong bytes twice.*HF_ENDPOINT"
    ):
        model_files.fetch(HubName(NAME))
    assert find_snapshot(HubName(NAME)) is None


def test_gated_models_say_what_to_do(hub, monkeypatch):
    hub.gated.add(NAME)
    hub.tokens[NAME] = "hf_secret"
    with pytest.raises(
        HubError, match=rf"{NAME} is gated: accept its terms at {hub.url}/{NAME}, then set HF_TOKEN"
    ):
        model_files.fetch(HubName(NAME))
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_secret")
    assert model_files.fetch(HubName(NAME)).is_dir()


def test_a_name_that_the_hub_does_not_know_has_two_readings(hub):
    with pytest.raises(HubError, match=rf"tiny/Nobody is no directory here, and {hub.url} has no such model"):
        model_files.fetch(HubName("tiny/Nobody"))
    with pytest.raises(HubError, match=f"{NAME} has no revision 'v7': see .*/tree/main"):
        model_files.fetch(HubName(NAME, "v7"))
    assert model_files.fetch(HubName(NAME, "v1")).name == COMMIT


def test_nobody_answers(hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        HubError, match=r"http://127.0.0.1:9 does not answer .*and tiny/Qwen3-Tiny is not here: check"
    ):
        model_files.fetch(HubName(NAME))
    hub.busy = 99
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    with pytest.raises(HubError, match="answers 503 for tiny/Qwen3-Tiny; try again later"):
        model_files.fetch(HubName(NAME))


@pytest.mark.parametrize("file", ["../../../evil.safetensors", "/etc/evil.json", "a/../../b.json"])
def test_a_repository_cannot_write_outside_the_cache(hub, file, tmp_path):
    hub.repos[NAME][file] = b"{}"
    with pytest.raises(HubError, match="does not answer as a hub does"):
        model_files.fetch(HubName(NAME))
    assert not list(tmp_path.rglob("*evil*"))


@pytest.mark.parametrize("index", [b"", b"[]", b"{}", b'{"weight_map": 1}', b"\xff\xfe\xff", b"[" * 100_000])
def test_an_index_that_is_none(hub, index):
    hub.repos[NAME][INDEX] = index
    with pytest.raises(HubError, match="has no 'weight_map'.*repository is broken"):
        model_files.fetch(HubName(NAME))


def test_a_full_disk_is_known_before(hub, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=300_000)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(
        HubError, match=r"needs 0.0 GB more in .*0.0 GB are free: free 1.1 GB, or set HF_HUB_CACHE"
    ):
        model_files.fetch(HubName(NAME))
    assert not any(name.endswith(".safetensors") for name in hub.fetched())


def test_what_does_not_fit_is_not_fetched_unless_it_is_forced(hub, monkeypatch):
    small = Machine.detect_cpus()
    small = type(small)(small.cpu_model, small.cores, small.tiers, 1 << 26, 1 << 26)
    monkeypatch.setattr(model_files, "this_machine", lambda: small)
    config = EngineConfig.from_args([NAME, "--kernel-tier", "scalar"])
    with pytest.raises(ConfigError, match=r"the model does not fit(.|\n)*was not fetched .*--force fetches"):
        model_files.prepare(config)
    assert not any(name.endswith(".safetensors") for name in hub.fetched())
    model_files.prepare(config, force=True)
    assert resolve_model(NAME).is_dir()


def test_a_text_that_cannot_be_read_is_known_before_the_weights_are_fetched(hub):
    """Some repositories have a tokenizer of another form, and some hundreds of gigabytes of weights."""
    del hub.repos[NAME]["tokenizer.json"]
    config = EngineConfig.from_args([NAME])
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json.*was not fetched .*--force fetches"):
        model_files.prepare(config)
    assert not any(name.endswith(".safetensors") for name in hub.fetched())
    model_files.prepare(config, force=True)
    assert resolve_model(NAME).is_dir()


def test_the_plan_comes_before_the_weights(hub):
    seen = []
    model_files.prepare(
        EngineConfig.from_args([NAME]), lambda planned, nbytes: seen.append((planned, nbytes))
    )
    ((planned, nbytes),) = seen
    assert nbytes == sum(len(hub.repos[NAME][name]) for name in shards_of(hub))
    assert planned.plan.ledgers and planned.model.moe.router.num_experts == 12
    hub.repos["tiny/Unknown"] = hub.repos[NAME] | {"config.json": b'{"model_type": "next_year"}'}
    with pytest.raises(ConfigError, match="model_type 'next_year' is not supported"):
        model_files.prepare(EngineConfig.from_args(["tiny/Unknown"]))


def test_the_serving_process_finds_what_its_child_has_fetched(hub, capfd):
    config = EngineConfig.from_args([NAME, "--api-key", "s3cret"])
    assert not all_is_here(config)
    prepare.main([NAME, "--api-key", "s3cret"])
    assert "it fits: " in capfd.readouterr().err
    assert all_is_here(config)
    (find_snapshot(HubName(NAME)).directory / shards_of(hub)[0]).unlink()
    assert not all_is_here(config)


@pytest.fixture
def gguf(hub, source, tmp_path) -> FakeHub:
    whole = source.parent / "whole"
    one = write_gguf(whole, tmp_path / "q.gguf").read_bytes()
    files = {"README.md": b"", "Tiny-Q8_0.gguf": one, "mmproj-Tiny-f16.gguf": b"GGUF", "Tiny-UD-Q4_K_M.gguf": one,
             "Q4_K_M/Tiny-Q4_K_M.gguf": one}  # fmt: skip
    hub.repos["tiny/Tiny-GGUF"] = files
    return hub


def test_one_quantisation_is_fetched(gguf):
    planned = []
    config = EngineConfig.from_args(["tiny/Tiny-GGUF:q4_k_m"])
    model_files.prepare(config, lambda found, nbytes: planned.append(found.stored))
    assert planned and resolve_model("tiny/Tiny-GGUF:Q4_K_M").name == "Tiny-Q4_K_M.gguf"
    assert set(gguf.fetched()) == {"Q4_K_M/Tiny-Q4_K_M.gguf"}
    assert LLM("tiny/Tiny-GGUF:Q4_K_M", max_total_tokens=64, kt_cpuinfer=1).engine.plan.ledgers


MIXED = {
    "UD-Q2_K_XL": ["Tiny-UD-Q2_K_XL.gguf"],
    "IQ3_XXS": ["Tiny-IQ3_XXS.gguf"],
    "UD-IQ3_XXS": ["UD-IQ3_XXS/Tiny-UD-IQ3_XXS-00001-of-00002.gguf", "UD-IQ3_XXS/Tiny-UD-IQ3_XXS-00002-of-00002.gguf"],
    "Q2_K": ["Tiny-Q2_K.gguf"],
}


@pytest.fixture
def mixed(hub, source, tmp_path) -> FakeHub:
    """Files as their publishers name them: mixed by tensor (UD) or not, whole or in parts."""
    (folder := tmp_path / "parts").mkdir()
    whole = write_gguf(source.parent / "whole", tmp_path / "q.gguf")
    parts = [part.read_bytes() for part in split(whole, folder, 2)]
    one = {name: whole.read_bytes() for files in MIXED.values() for name in files if len(files) == 1}
    hub.repos["tiny/Mixed-GGUF"] = one | dict(zip(MIXED["UD-IQ3_XXS"], parts, strict=True))
    return hub


@pytest.mark.parametrize("variant", MIXED)
def test_the_files_that_a_short_name_means_are_served(mixed, variant):
    model_files.prepare(EngineConfig.from_args([f"tiny/Mixed-GGUF:{variant}"]))
    assert set(mixed.fetched()) == set(MIXED[variant])
    path = resolve_model(f"tiny/Mixed-GGUF:{variant}")
    assert path.name == MIXED[variant][0].rsplit("/", 1)[-1]
    assert LLM(f"tiny/Mixed-GGUF:{variant}", max_total_tokens=64, kt_cpuinfer=1).engine.plan.ledgers


@pytest.mark.parametrize("where", ["hub", "folder"])
def test_a_plan_compares_the_files_of_which_none_was_named(mixed, tmp_path, where):
    """No weights are fetched for it. The serving line that it gives is taken."""
    model = "tiny/Mixed-GGUF"
    if where == "folder":
        (folder := tmp_path / "here").mkdir()
        for name, content in mixed.repos[model].items():
            (folder / name.rsplit("/", 1)[-1]).write_bytes(content)
        model = str(folder)
        (folder / "Tiny-broken.gguf").write_bytes(b"GGUF" + bytes(60))  # the others are compared nevertheless
    words = ("plan", model, "--bandwidth", "50GB/s", "--cpu", "2", "--isa", "scalar")
    shown = kt(*words, "--json")
    assert shown.exit_code == 0, shown.output
    assert ("Tiny-broken.gguf: " in shown.stderr) == (where == "folder")
    rows = json.loads(shown.stdout)["quantisations"]
    assert len(rows) == len(MIXED) and all(row["fits"] and row["types"] == "f32" for row in rows)
    assert [row["kl"] for row in rows] == [0.0] * len(MIXED)  # nothing is rounded
    sizes = [row["file_bytes"] for row in rows]
    assert sizes == sorted(sizes, reverse=True) and rows[0]["plan"]["ram_bytes"] > 0
    first = rows[0]["name"]
    assert f"The largest that fits: kt serve {first}" in " ".join(kt(*words).stdout.split())
    if where == "hub":
        assert find_snapshot(HubName(model)) is None  # headers alone were read
        model_files.prepare(EngineConfig.from_args([first]))
    assert resolve_model(first).is_file()
    too_small = kt(*words, "--ram", "1GB", "--max-total-tokens", "99999999")
    assert too_small.exit_code == 2 and "None of its files runs there" in too_small.stdout


def test_a_quantisation_has_to_be_named(gguf):
    with pytest.raises(
        HubError, match=r"has several; say which: tiny/Tiny-GGUF:Q4_K_M. It has .*Tiny-Q8_0 \(0.0 GB\)"
    ):
        model_files.fetch(HubName("tiny/Tiny-GGUF"))
    with pytest.raises(HubError, match=r"has no Q3_K_S; say which"):
        model_files.fetch(HubName("tiny/Tiny-GGUF", variant="Q3_K_S"))
    gguf.repos["tiny/Bins"] = {"config.json": b"{}", "pytorch_model.bin": bytes(1 << 21)}
    with pytest.raises(HubError, match=r"holds neither \*.safetensors nor \*.gguf \(bin\)"):
        model_files.fetch(HubName("tiny/Bins"))


def test_all_parts_of_a_quantisation_are_fetched(hub, source, tmp_path):
    (folder := tmp_path / "parts").mkdir()
    parts = split(write_gguf(source.parent / "whole", tmp_path / "whole.gguf"), folder, 3)
    for number, part in enumerate(parts, 1):
        part.rename(folder / f"T-Q4_0-{number:05}-of-00003.gguf")
    hub.add("tiny/Split", folder)
    model_files.prepare(EngineConfig.from_args(["tiny/Split:Q4_0"]))
    path = resolve_model("tiny/Split:Q4_0")
    assert path.name == "T-Q4_0-00001-of-00003.gguf" and len(list(path.parent.glob("*.gguf"))) == 3
    path.with_name("T-Q4_0-00002-of-00003.gguf").unlink()
    with pytest.raises(HubError, match=r"lacks \*Q4_0\*.gguf"):
        resolve_model("tiny/Split:Q4_0")


def test_kt_model(gguf):
    assert "no models" in kt("model", "list").stdout
    pulled = kt("model", "pull", NAME)
    assert pulled.exit_code == 0 and pulled.stdout.strip() == str(resolve_model(NAME)), pulled.output
    assert kt("model", "pull", "tiny/Tiny-GGUF:Q8_0").exit_code == 0
    assert [kept.name for kept in kept_models()] == [NAME, "tiny/Tiny-GGUF:Tiny-Q8_0"]
    assert kt("model", "path", NAME).stdout.strip() == pulled.stdout.strip()
    for name in (NAME, "tiny/Tiny-GGUF:Q8_0"):
        assert "are free again" in kt("model", "rm", name).stdout
        assert isinstance(kt("model", "rm", name).exception, HubError)
        assert isinstance(kt("model", "path", name).exception, HubError)
    assert isinstance(kt("model", "pull", "/models/x").exception, ConfigError)


def test_a_new_revision_is_pulled_and_served(hub):
    old = model_files.fetch(HubName(NAME))
    hub.commit = "f" * 40
    assert model_files.fetch(HubName(NAME)) == old
    assert model_files.pull(HubName(NAME)).name == "f" * 40 == resolve_model(NAME).name
    assert len(hub.fetched(shards_of(hub)[0])) == 1  # the same bytes are not fetched again


def test_paths_never_ask_the_network(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    typos = ["/models/Qwen", "./Qwen/Qwen3", "~/Qwen", "models/Qwen3-30B", "../x/y", "Qwen3-30B-A3B", "a/b/c",
             "org/model.gguf", "demos"]  # fmt: skip
    for text in typos:
        assert hub_name(text) is None
        with pytest.raises(CheckpointError, match="does not exist"):
            model_files.prepare(EngineConfig.from_args([text]))
    assert hub.asked == []
    with pytest.raises(
        CheckpointError, match=r"though models is a directory here.*https://huggingface.co/models/Qwen3"
    ):
        resolve_model("models/Qwen3")
    with pytest.raises(
        CheckpointError, match=r"is no name of the hub either: .*ORG/NAME \(as Qwen/Qwen3-30B-A3B\)"
    ):
        resolve_model("Qwen3-30B-A3B")


def test_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub_name("Qwen/Qwen3-30B-A3B") == HubName("Qwen/Qwen3-30B-A3B")
    assert hub_name("org/repo:Q4_K_M") == HubName("org/repo", variant="Q4_K_M")
    assert hub_name("org/repo@v1.2:Q8_0") == HubName("org/repo", "v1.2", "Q8_0")
    (tmp_path / "org").mkdir()
    assert hub_name("org/repo") is None
    assert hub_name("https://huggingface.co/org/repo") == HubName("org/repo")
    assert [shown_name(name) for name in ("Qwen/Q3", "/models/Q3", "a/b@v1:Q4")] == [
        "Qwen/Q3",
        "Q3",
        "a/b@v1:Q4",
    ]


def test_a_killed_download_goes_on(hub, source, tmp_path):
    """A process of its own, killed in the middle of a file; the environment says which hub and which cache."""
    big = os.urandom(6 << 20)
    hub.repos[NAME] = hub.repos[NAME] | {shards_of(hub)[0]: big}
    hub.held_at[shards_of(hub)[0]] = 3 << 20
    source_root = Path(model_files.__file__).parents[3]
    environment = os.environ | {
        "HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "hub"), "PYTHONPATH": str(source_root),
        "HF_HUB_OFFLINE": "0",
    }  # fmt: skip
    command = [sys.executable, "-m", "tandem", "model", "pull", NAME, "--force"]
    running = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    digest = hashlib.sha256(big).hexdigest()
    partial = tmp_path / "hub" / "models--tiny--Qwen3-Tiny" / "blobs" / f"{digest}.incomplete"
    deadline = time.monotonic() + 120
    while not (partial.exists() and partial.stat().st_size > 1 << 20):
        assert time.monotonic() < deadline and running.poll() is None
        time.sleep(0.02)
    running.send_signal(signal.SIGKILL)
    running.wait()
    here = partial.stat().st_size
    hub.goes_on.set()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / shards_of(hub)[0]).read_bytes() == big
    assert (f"/{NAME}/resolve/{COMMIT}/{shards_of(hub)[0]}", f"bytes={here}-") in hub.asked


def test_a_plan_by_name_fetches_no_weights(hub, gguf):
    for name in (NAME, "tiny/Tiny-GGUF:Q8_0"):
        shown = kt("plan", name, "--bandwidth", "50GB/s", "--cpu", "2", "--isa", "scalar", "--json")
        assert shown.exit_code == 0, shown.output
        assert '"fits": true' in shown.stdout
    assert not any(name.endswith(".safetensors") for name in hub.fetched())
    assert find_snapshot(HubName("tiny/Tiny-GGUF", variant="Q8_0")) is None


def test_a_plan_without_a_hub_takes_what_describes_the_model(hub, source, monkeypatch):
    snapshot = Path(constants.HF_HUB_CACHE) / "models--tiny--Other" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    words = ("plan", "tiny/Other", "--bandwidth", "50GB/s", "--cpu", "2", "--isa", "scalar", "--json")
    assert isinstance(kt(*words).exception, HubError)
    shutil.copy(source / "config.json", snapshot)
    shown = kt(*words)
    assert shown.exit_code == 0 and '"fits": true' in shown.stdout


def test_what_is_said_before_a_download(hub, capsys):
    from tandem.cli.prepare import say_coming

    model_files.prepare(EngineConfig.from_args([NAME]), say_coming)
    said = capsys.readouterr().err
    assert "it fits: " in said and "RAM; decoding " in said and "tokens/s; 0.0 GB are fetched first" in said


@pytest.mark.fault("The disk is full: a download (`RLIMIT_FSIZE`)")
def test_a_disk_that_fills_up_during_a_download(hub, source, tmp_path, fault):
    """Its size was looked at before; somebody else has written meanwhile. What is here stays."""
    big = os.urandom(6 << 20)
    hub.repos[NAME] = hub.repos[NAME] | {shards_of(hub)[0]: big}
    environment = os.environ | {
        "HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0",
        "PYTHONPATH": str(Path(model_files.__file__).parents[3]),
    }  # fmt: skip
    command = [sys.executable, "-m", "tandem", "model", "pull", NAME, "--force"]

    def full() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    fault.strikes()
    failed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, preexec_fn=full)
    fault.seen("it ends: “… cannot be written (…): free some space, or set HF_HUB_CACHE”; the same command goes on", 60)
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    assert "cannot be written" in failed.stderr and "HF_HUB_CACHE" in failed.stderr
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    fault.good(120)
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / shards_of(hub)[0]).read_bytes() == big
    assert any(given and path.endswith(shards_of(hub)[0]) for path, given in hub.asked)


@pytest.mark.parametrize(
    ("variant", "meant"),
    [
        ("UD-Q2_K_XL", ["Tiny-UD-Q2_K_XL"]),
        ("Q2_K_XL", ["Tiny-UD-Q2_K_XL"]),  # there is no other
        ("Q2_K", ["Tiny-Q2_K"]),
        ("IQ3_XXS", ["Tiny.i1-IQ3_XXS"]),
        ("ud-iq3_xxs", ["UD-IQ3_XXS/Tiny-UD-IQ3_XXS"]),
        ("IQ2_M", ["UD-IQ2_M/Tiny-UD-IQ2_M"]),
        ("IQ4_XS", ["Tiny-IQ4_XS"]),
        ("IQ2_XXS", []),
    ],
)
def test_quantisations_by_their_common_names(variant: str, meant: list[str]) -> None:
    """As publishers spell them: mixed by tensor (UD), with an importance matrix (i1), in folders of their own."""
    parts = [f"UD-IQ3_XXS/Tiny-UD-IQ3_XXS-0000{i}-of-00002.gguf" for i in (1, 2)]
    names = ["UD-Q2_K_XL", "Q2_K", "Q2_K_L", "IQ4_XS", "IQ4_NL", "UD-IQ4_XS"]
    whole = [f"Tiny-{name}.gguf" for name in names] + ["Tiny.i1-IQ3_XXS.gguf", "UD-IQ2_M/Tiny-UD-IQ2_M.gguf"]
    assert variant_of(gguf_variants([*whole, *parts]), variant) == meant
