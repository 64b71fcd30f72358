"""Loading a whole model: in chunks, from the checkpoint or from the packed cache, the same model comes out."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import kernel_cases as cases
from tandem import LLM, SamplingParams, _core, models
from tandem.checkpoint import open_checkpoint
from tandem.errors import CheckpointError, ConfigError
from tandem.experts import CpuExperts, feed
from tandem.experts.feed import ExpertFeed, LayerFeed, feed_of
from tandem.kernels.cpu import PackedExperts, PackedMatrix, WorkerPool, Workspace
from tandem.kernels.packed import verification
from tandem.kernels.packed.cache import PackedCache
from tandem.kernels.packed.file import PackedFile, PackedWriter

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1)
VARIANTS = ["qwen2_moe", "glm4_moe", "olmoe-clip", "qwen3_moe-tied"]


def answer(model: Path, **flags: object) -> tuple[list[int], object]:
    """Tokens and log-probabilities, bit for bit."""
    llm = LLM(str(model), max_total_tokens=256, kernel_tier=cases.PLAIN_TIER, kt_cpuinfer=2, **flags)
    [result] = llm.generate([[5, 9, 250, 17]], GREEDY)
    return result.token_ids, result.logprobs


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("method", ["BF16", "INT4"])
def test_the_second_start_answers_the_same_and_packs_nothing(
    tiny_models, tmp_path: Path, monkeypatch, capsys, variant: str, method: str
) -> None:
    model, flags = tiny_models[variant], {"packed_cache": str(tmp_path), "kt_method": method}
    plain = answer(model, kt_method=method)
    assert answer(model, **flags) == plain
    assert "written to" in capsys.readouterr().err
    [file] = tmp_path.iterdir()
    assert file.name.startswith(model.name)

    def packing(*_: object, **__: object) -> None:
        raise AssertionError("something was packed")

    monkeypatch.setattr(PackedMatrix, "__init__", packing)
    monkeypatch.setattr(PackedExperts, "load_all", packing)
    assert answer(model, **flags) == plain
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("variant", ["qwen2_moe", "glm4_moe"])
def test_a_model_divided_among_memory_nodes_answers_the_same(
    tiny_models, tmp_path: Path, capsys, variant: str
) -> None:
    model, flags = tiny_models[variant], {"packed_cache": str(tmp_path)}
    whole = answer(model, **flags)
    capsys.readouterr()
    assert answer(model, kt_threadpool_count=2, **flags) == whole
    assert "the model is packed again" in capsys.readouterr().err  # bytes lie in another order
    assert answer(model, kt_threadpool_count=2, **flags) == whole
    assert capsys.readouterr().err == ""


def test_a_cache_of_an_older_checkpoint_is_named_and_replaced(tiny_models, tmp_path: Path, capsys) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_models["olmoe"], model)
    flags = {"packed_cache": str(tmp_path / "cache")}
    before = answer(model, **flags)
    other = tiny_models["olmoe-clip"]
    for file in model.glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-4000:] = bytes(4000)  # other weights, the same sizes
        file.write_bytes(data)
        os.utime(file, ns=(1, 1))
    capsys.readouterr()
    after = answer(model, **flags)
    assert after == answer(model) != before
    said = capsys.readouterr().err
    assert re.search(
        r"note: packed cache: .*\.packed was made from .*, not from .*; the model is packed again", said
    )
    assert "written to" in said
    assert answer(other) != before


def damage(file: Path) -> None:
    """One bit of the first weight."""
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)


def test_a_damaged_cache_is_never_used(tiny_models, tmp_path: Path, capsys) -> None:
    model, flags = tiny_models["qwen3_moe"], {"packed_cache": str(tmp_path)}
    right = answer(model, **flags)
    [file] = tmp_path.iterdir()
    damage(file)
    assert answer(model, **flags) == right
    assert f"note: packed cache: {file} is damaged at byte" in capsys.readouterr().err


def test_damage_that_is_found_after_building_is_not_served(
    tiny_models, tmp_path: Path, monkeypatch, capsys
) -> None:
    """Verifying takes longer than building from the file: here it begins when that is done."""
    model, flags = tiny_models["qwen3_moe"], {"packed_cache": str(tmp_path)}
    right, built, check, build = answer(model, **flags), threading.Event(), PackedFile.check, models.build
    [file] = tmp_path.iterdir()
    damage(file)
    builds: list[bool] = []
    before: list[weakref.ref[object]] = []

    def late(*arguments: object) -> None:
        assert built.wait(60)
        check(*arguments)

    def counted(*arguments: object) -> object:
        assert all(reference() is None for reference in before)  # never two at once
        made = build(*arguments)
        before.append(weakref.ref(made))
        builds.append(arguments[6].mapped)
        built.set()
        return made

    monkeypatch.setattr(PackedFile, "check", late)
    monkeypatch.setattr(models, "build", counted)
    capsys.readouterr()
    assert answer(model, **flags) == right
    assert builds == [True, False]  # from the file, then from the checkpoint
    said = capsys.readouterr().err
    assert f"note: packed cache: {file} is damaged at byte" in said and "written to" in said
    assert answer(model, **flags) == right and builds[2:] == [True]
    assert capsys.readouterr().err == ""


def test_damage_is_not_written_into_a_completed_file(
    tiny_models, tmp_path: Path, monkeypatch, capsys
) -> None:
    """What a file lacks is added to it in a new one, whose checksums are made anew."""
    model, flags = tiny_models["qwen3_moe"], {"packed_cache": str(tmp_path)}
    add = PackedWriter.add
    monkeypatch.setattr(PackedWriter, "add", lambda *a: add(*a) if "layers.1" not in a[1] else None)
    right = answer(model, **flags)
    monkeypatch.setattr(PackedWriter, "add", add)
    [file] = tmp_path.iterdir()
    damage(file)
    capsys.readouterr()
    assert answer(model, **flags) == right
    assert f"{file} is damaged at byte" in capsys.readouterr().err
    assert answer(model, **flags) == right
    assert capsys.readouterr().err == ""


def test_nothing_is_verified_any_more_after_a_start_that_failed(
    tiny_models, tmp_path: Path, monkeypatch
) -> None:
    """What is being checked ends, and nothing new is begun: of many parts two, one by each thread."""
    model, flags = tiny_models["qwen3_moe"], {"packed_cache": str(tmp_path)}
    answer(model, **flags)
    failed, checks, check = threading.Event(), list[object](), PackedFile.check

    def slow(*arguments: object) -> object:
        checks.append(arguments)
        assert failed.wait(60)
        return check(*arguments)

    monkeypatch.setattr(PackedFile, "check", slow)
    monkeypatch.setattr(verification, "_batches", lambda parts: [[part] for part in parts])
    with pytest.raises(ConfigError, match="context"):
        answer(model, context_length=1 << 40, **flags)
    failed.set()
    started = time.monotonic()
    while any("tandem-verification" in t.name for t in threading.enumerate()):
        assert time.monotonic() - started < 60
        time.sleep(0.01)
    assert len(checks) <= verification.THREADS


def test_a_wait_that_was_interrupted_ends_the_verification(tmp_path: Path, monkeypatch) -> None:
    pool, path = WorkerPool([-1]), tmp_path / "some.packed"
    workspace = Workspace(pool, "scalar")
    cache = PackedCache(path, "key", "about", workspace, pool, print)
    for name in "abcdefgh":
        cache.keep(name, PackedMatrix(workspace, torch.randn(512, 1024)))  # a block each
    cache.finish(lambda _done, _total: None)
    checks, check, go, numbers = list[object](), PackedFile.check, threading.Event(), itertools.count()

    def counted(*arguments: object) -> object:
        checks.append(arguments)
        assert next(numbers) == 0 or go.wait(60)  # by one thread, whatever the other does
        return check(*arguments)

    def interrupted(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PackedFile, "check", counted)
    monkeypatch.setattr(verification, "VERIFY_BYTES", verification.BLOCK_BYTES)
    again = PackedCache(path, "key", "about", workspace, pool, print)
    again.begin()
    with pytest.raises(KeyboardInterrupt):
        again.confirm(interrupted)
    again.stop()
    go.set()
    while any("tandem-verification" in t.name for t in threading.enumerate()):
        time.sleep(0.01)
    assert len(checks) <= 2 + verification.THREADS


def test_experts_are_asked_for_in_chunks_by_another_thread(monkeypatch) -> None:
    monkeypatch.setattr(feed, "CHUNK_BYTES", 3 * 3 * 40 * 96 * 4)  # three experts
    workspace = Workspace(WorkerPool([-1, -1]), "scalar")
    weights = [tuple(torch.randn(*shape) for shape in ((40, 96), (40, 96), (96, 40))) for _ in range(8)]
    asked: list[int] = []

    def matrices(expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert expert == 0 or threading.current_thread() is not threading.main_thread()
        asked.append(expert)
        return weights[expert]

    whole, apart = (PackedExperts(workspace, 8, 96, 40, "f32") for _ in range(2))
    CpuExperts(whole).load(feed_of(8, matrices))
    for expert, matrices_of in enumerate(weights):
        apart.load(expert, *matrices_of)
    assert sorted(asked) == list(range(8))
    assert [bytes(part) for part in whole.parts()] == [bytes(part) for part in apart.parts()]


def views(expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made = torch.full((2, 16, 32), float(expert)).bfloat16()
    return made[0], made[1], made[0].view(32, 16)


def test_views_are_packed_as_many_together_as_are_found() -> None:
    """A slow packer finds all others ready when it comes back; sizes add up, every expert comes once and in order."""
    asked: list[int] = []

    def noting(expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        asked.append(expert)
        return views(expert)

    seen, longest = [], 0
    for first, run in feed_of(64, noting).runs():
        while len(asked) < 64 and longest:  # packing
            time.sleep(0.001)
        longest = max(longest, len(run))
        seen += [(first + i, int(gate[0, 0])) for i, (gate, _, _) in enumerate(run)]
    assert seen == [(i, i) for i in range(64)] and asked == list(range(64))
    assert longest > 1


def looking(count: int, matrices) -> LayerFeed:
    made = feed_of(count, matrices)
    made.look_ahead(0.0)
    return made


def test_the_next_layer_is_looked_up_while_the_last_is_packed() -> None:
    """In the order of layers, once each; not those that no start asked for, and none where finding is all."""
    asked: list[tuple[int, int]] = []

    def matrices_of(layer: int):
        return lambda expert: (asked.append((layer, expert)), views(expert))[1]

    for ahead in (True, False):
        asked.clear()
        feeds = ExpertFeed((3, 5, 6), ahead=ahead)
        for layer, following in ((3, 5), (5, 6), (6, None)):
            for _ in feeds.layer(layer, 4, matrices_of).runs():
                pass
            if ahead and following is not None:
                wait([feeds._ahead.feed.looking])
                assert asked[-4:] == [(following, expert) for expert in range(4)]
        feeds.close()
        assert asked == [(layer, expert) for layer in (3, 5, 6) for expert in range(4)]


@pytest.mark.parametrize("late", [0, 5, 40])
def test_what_was_looked_up_ahead_is_not_looked_up_again(late: int) -> None:
    """However far the looking has come when the first expert is called for; what cannot be read is said then."""
    asked, stands, gone_on = list[int](), threading.Event(), threading.Event()

    def slow(expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if expert >= late and threading.current_thread() is not threading.main_thread():
            stands.set()
            gone_on.wait()
        if expert == 30:
            raise CheckpointError("expert 30 is not there")
        asked.append(expert)
        return views(expert)

    ahead = looking(40, slow)
    while len(asked) < min(late, 30):
        time.sleep(0.001)
    assert late > 30 or stands.wait(60)  # the last one before has arrived
    for expert in range(30):
        assert ahead(expert)[0][0, 0] == expert
    with pytest.raises(CheckpointError, match="expert 30"):
        ahead(30)
    gone_on.set()
    wait([ahead.looking])
    assert len(asked) - len(set(asked)) <= 1  # the one that was being looked up


def test_of_what_takes_memory_one_expert_is_made_ahead() -> None:
    asked: list[int] = []
    ahead = looking(4, lambda expert: (asked.append(expert), tuple(w.float() for w in views(expert)))[1])
    wait([ahead.looking])
    assert asked == [0]
    assert [int(ahead(expert)[0][0, 0]) for expert in range(4)] == [0, 1, 2, 3] == asked


@pytest.mark.parametrize("fmt", ["bf16", "int8"])
def test_many_huge_pages_are_filled_as_a_few_are(fmt: str) -> None:
    """One worker clears and fills a huge page; panels that lie across two are whole."""
    workspace = Workspace(WorkerPool([-1, -1, -1]), "scalar")
    gate = torch.randn(16, 704, 1000).bfloat16()
    experts = [(g, g.flip(0), g.T.contiguous()) for g in gate]
    together, apart = (PackedExperts(workspace, 16, 1000, 704, fmt) for _ in range(2))
    together.load_all(0, experts)
    assert together.packed_bytes > 8 * 3 * (2 << 20) or fmt == "int8"
    for expert, matrices in enumerate(experts):
        apart.load(expert, *matrices)
    assert [bytes(part) for part in together.parts()] == [bytes(part) for part in apart.parts()]


def test_an_error_of_one_expert_is_the_error_of_loading() -> None:
    layer = CpuExperts(PackedExperts(Workspace(WorkerPool([-1]), "scalar"), 4, 32, 16, "f32"))

    def matrices(expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if expert == 2:
            raise ValueError("expert 2 cannot be read")
        return torch.zeros(16, 32), torch.zeros(16, 32), torch.zeros(32, 16)

    with pytest.raises(ValueError, match="expert 2"):
        layer.load(feed_of(4, matrices))


LAYERS, LAYER_EXPERTS, HIDDEN, WIDTH = 6, 32, 512, 256
LOADING = """
import sys
from pathlib import Path
from tandem.flags.engine_config import EngineConfig
from tandem.engine.start import loader

def resident(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))

loader.Tokenizer.load = classmethod(lambda *_: None)
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
parts = loader.load_parts(EngineConfig(model=sys.argv[1], context_length=64, kt_cpuinfer=2))
print(resident("VmHWM") - resident("VmRSS"))
"""


def save_large_layers(directory: Path) -> int:
    """A Qwen3-MoE whose layers outweigh what Python allocates meanwhile; bytes of one."""
    from transformers import Qwen3MoeConfig

    Qwen3MoeConfig(
        hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, head_dim=128,
        num_experts=LAYER_EXPERTS, num_experts_per_tok=4, moe_intermediate_size=WIDTH, vocab_size=512,
        architectures=["Qwen3MoeForCausalLM"],
    ).save_pretrained(directory)  # fmt: skip
    noise, total = torch.randn(LAYER_EXPERTS * WIDTH, HIDDEN, dtype=torch.float32).bfloat16() * 0.02, 0
    outer = {
        "model.embed_tokens.weight": noise[:512],
        "lm_head.weight": noise[:512],
        "model.norm.weight": noise[0],
    }
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        a, tensors = p + "self_attn.", {}
        shapes = {
            "q_proj": (512, HIDDEN),
            "k_proj": (256, HIDDEN),
            "v_proj": (256, HIDDEN),
            "o_proj": (HIDDEN, 512),
        }
        tensors |= {f"{a}{name}.weight": noise[: shape[0], : shape[1]] for name, shape in shapes.items()}
        tensors |= {f"{a}{name}.weight": noise[0, :128] for name in ("q_norm", "k_norm")}
        tensors |= {f"{p}{name}.weight": noise[0] for name in ("input_layernorm", "post_attention_layernorm")}
        tensors[p + "mlp.gate.weight"] = noise[:LAYER_EXPERTS]
        for e in range(LAYER_EXPERTS):
            mine = noise[e * WIDTH : (e + 1) * WIDTH]
            matrices = {"gate_proj": mine, "up_proj": mine, "down_proj": mine.view(HIDDEN, WIDTH)}
            tensors |= {f"{p}mlp.experts.{e}.{name}.weight": matrix for name, matrix in matrices.items()}
        total = sum(tensor.nbytes for tensor in tensors.values())
        outer |= tensors
    save_file({name: tensor.clone() for name, tensor in outer.items()}, directory / "model.safetensors")
    return total


def test_peak_memory_is_the_final_one_and_two_layers(tmp_path: Path) -> None:
    """Mapped file pages included: experts are read straight into their packed place."""
    layer = save_large_layers(tmp_path)
    done = subprocess.run([sys.executable, "-c", LOADING, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert layer > 25e6 and int(done.stdout) < 2 * layer


def test_without_a_file_to_read_the_mapping_is_read() -> None:
    """As where there are too many open files."""
    weight, workspace = torch.randn(64, 96).bfloat16(), Workspace(WorkerPool([-1]), "scalar")
    expected = PackedMatrix(workspace, weight).dequantised()
    known = _core.ReadableFile(-1, weight.data_ptr(), weight.nbytes)
    assert torch.equal(PackedMatrix(workspace, weight).dequantised(), expected)
    del known


def test_a_file_is_read_only_while_it_is_known(tmp_path: Path) -> None:
    """Other bytes in the file than at the address: whose are packed says what was read."""
    here, there, workspace = (
        torch.ones(64, 96).bfloat16(),
        torch.zeros(64, 96),
        Workspace(WorkerPool([-1]), "scalar"),
    )
    (tmp_path / "file").write_bytes(there.bfloat16().view(torch.uint8).numpy().tobytes())
    with (tmp_path / "file").open("rb") as file:
        known = _core.ReadableFile(file.fileno(), here.data_ptr(), here.nbytes)
    assert torch.equal(PackedMatrix(workspace, here).dequantised(), there)
    del known
    assert torch.equal(PackedMatrix(workspace, here).dequantised(), here.float())


def test_a_file_that_is_cut_short_while_it_is_loaded_is_an_error(tmp_path: Path) -> None:
    save_large_layers(tmp_path)
    file = tmp_path / "model.safetensors"
    checkpoint = open_checkpoint(tmp_path)
    weight = checkpoint.weight("model.layers.5.mlp.experts.31.up_proj", (WIDTH, HIDDEN))
    os.truncate(file, 1 << 20)
    with pytest.raises(CheckpointError, match="became shorter while it was read"):
        PackedMatrix(Workspace(WorkerPool([-1]), "scalar"), weight)
