"""Experts used in a checkpoint's own rows: the same bits as packed ones, and when that is done."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kernel_cases as cases
from plans import GIB, MODEL, machine, reason
from quantised_models import save_deepseek_names
from tandem import LLM, SamplingParams, _core
from tandem.checkpoint import open_checkpoint
from tandem.engine.start.loader import load_parts
from tandem.errors import CheckpointError, ConfigError, KernelError
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.cpu import PackedExperts, PackedMatrix, WorkerPool, Workspace
from tandem.kernels.ops import ExpertBiases
from tandem.planner import in_place
from tandem.planner.resolve import resolve
from tandem.spec.stored import StoredFormat, StoredFormats

EXPERTS, TOP_K = 6, 3
SIZES = [(64, 32), (160, 96), (2048, 64)]  # rows of 4 KiB share a set of L1
TOKENS = (1, 2, 3, 5, 17, 70, 110, 300)
Matrices = tuple[Tensor, Tensor, Tensor]


def mapped(path: Path, hidden: int, width: int, offset: int = 6) -> list[Matrices]:
    """Matrices in a mapped file, off a cache line as behind a header."""
    numbers = EXPERTS * 3 * hidden * width
    values = (torch.randn(numbers, generator=torch.Generator().manual_seed(1)) / 8).bfloat16()
    path.write_bytes(bytes(offset) + values.view(torch.uint8).numpy().tobytes())
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    whole = torch.frombuffer(data, dtype=torch.uint8)[offset:].view(torch.bfloat16)
    each = whole.view(EXPERTS, 3, hidden * width)
    return [(e[0].view(width, hidden), e[1].view(width, hidden), e[2].view(hidden, width)) for e in each]


def both(workspace: Workspace, experts: list[Matrices]) -> tuple[PackedExperts, PackedExperts]:
    width, hidden = experts[0][0].shape
    layers = [PackedExperts(workspace, EXPERTS, hidden, width, in_place=there) for there in (False, True)]
    for layer in layers:
        layer.load_all(0, experts)
    assert [layer.in_place for layer in layers] == [False, True]
    return layers[0], layers[1]


def run(layer: PackedExperts, tokens: int) -> Tensor:
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, layer.hidden, generator=g).bfloat16()
    ids = torch.rand(tokens, EXPERTS, generator=g).argsort(1)[:, :TOP_K].int().contiguous()
    weights = torch.rand(tokens, TOP_K, generator=g)
    return layer.forward(x, ids, weights, torch.full((tokens, layer.hidden), torch.nan))


@pytest.mark.parametrize(
    ("tier", "hidden", "width", "algorithm"), cases.pairwise(cases.TIERS, SIZES, ["auto", *cases.ALGORITHMS])
)
def test_bits_are_those_of_packed_experts(
    tmp_path: Path, tier: str, hidden: int, width: int, algorithm: str
) -> None:
    cases.require_tier(tier)
    packed, there = both(cases.workspace_of(tier, algorithm), mapped(tmp_path / "w", hidden, width))
    assert there.tier == tier
    assert [name for name, _, _ in there.formats] == ["bf16_rows", "bf16_rows"]
    for tokens in TOKENS:
        assert torch.equal(run(packed, tokens), run(there, tokens)), tokens


@pytest.mark.parametrize("tier", ["scalar", "avx2", "avx512_bf16", "amx"])
def test_bits_are_the_same_on_two_memory_nodes(tmp_path: Path, tier: str) -> None:
    cases.require_tier(tier)
    experts = mapped(tmp_path / "w", 160, 96)
    one, _ = both(cases.workspace_of(tier), experts)
    pool = WorkerPool([-1] * 3, 20, [0, 0, 1], [-1, -1])
    _, two = both(Workspace(pool, tier), experts)
    for tokens in (1, 17):
        assert torch.equal(run(one, tokens), run(two, tokens))


def test_biases_and_experts_that_are_elsewhere(tmp_path: Path) -> None:
    workspace, experts = cases.workspace_of(cases.PLAIN_TIER), mapped(tmp_path / "w", 64, 32)
    layers = [PackedExperts(workspace, EXPERTS, 64, 32, cpu_slots=3, in_place=there) for there in (False, True)]
    for layer in layers:
        for e in (1, 4, 5):
            layer.load(e, *experts[e])
        layer.set_biases(ExpertBiases(torch.ones(EXPERTS, 32), torch.zeros(EXPERTS, 32), torch.ones(EXPERTS, 64)))
    x, ids = torch.randn(4, 64).bfloat16(), torch.tensor([[1, 4], [5, -1], [4, 99], [-1, -1]]).int()
    packed, there = (layer.forward(x, ids, torch.ones(4, 2), torch.zeros(4, 64)) for layer in layers)
    assert torch.equal(packed, there)
    with pytest.raises(KernelError, match="routed to before"):
        layers[1].forward(x, torch.zeros_like(ids), torch.ones(4, 2))


def test_memory_is_kept_alive() -> None:
    layer = PackedExperts(cases.workspace_of(cases.PLAIN_TIER), EXPERTS, 64, 32, in_place=True)
    g = torch.Generator().manual_seed(1)
    for e in range(EXPERTS):  # nobody else has these; the last one is made of float32 with gaps
        gate, up = torch.randn(2, 32, 64, generator=g).bfloat16()
        layer.load(e, gate, up, torch.randn(32, 64, generator=g).T)
    first = run(layer, 5)
    _filled = [torch.full((32, 64), torch.nan, dtype=torch.bfloat16) for _ in range(200)]
    assert torch.equal(run(layer, 5), first)
    assert first.isfinite().all()


def test_there_are_no_packed_bytes(tmp_path: Path) -> None:
    experts = mapped(tmp_path / "w", 64, 32)
    packed, there = both(cases.workspace_of(cases.PLAIN_TIER), experts)
    room = torch.empty(there.bytes_per_expert, dtype=torch.uint8)
    for ask in (
        lambda: there.packed(0),
        there.parts,
        lambda: there.pack_to([0], experts[:1], room),
        lambda: there.load_packed(0, room),
        lambda: there.copy_all([0], room),
        lambda: packed.load_from(there, [0]),
        lambda: there.reserve(0),
    ):
        with pytest.raises(KernelError):
            ask()
    assert sum(r.bytes for r in there.bytes(2, 2)) == 2 * there.bytes_per_expert
    assert sum(r.bytes for r in there.all_cpu_slots()) == EXPERTS * there.bytes_per_expert


def test_other_sizes_and_formats_are_packed() -> None:
    workspace = cases.workspace_of(cases.PLAIN_TIER)
    for hidden, width, fmt in ((72, 32, "bf16"), (64, 20, "bf16"), (64, 32, "int8")):
        layer = PackedExperts(workspace, 2, hidden, width, fmt, in_place=True)
        layer.load(0, torch.randn(width, hidden), torch.randn(width, hidden), torch.randn(hidden, width))
        assert not layer.in_place
    rows = _core.WeightFormat("bf16_rows", 0, "f32")
    with pytest.raises(KernelError, match="only experts"):
        PackedMatrix(workspace, torch.randn(32, 32).bfloat16(), None, "bf16_rows")
    with pytest.raises(KernelError, match="multiples of 32"):
        _core.ExpertStore(workspace, 2, 72, 32, rows, rows, rows, "silu", 0.0, 0.0)


def test_a_file_that_became_shorter_is_an_error(tmp_path: Path) -> None:
    experts = mapped(tmp_path / "w", 160, 96)
    first = experts[0][0]
    with (tmp_path / "w").open("r+b") as file:
        _known = _core.ReadableFile(file.fileno(), first.data_ptr() - 6, (tmp_path / "w").stat().st_size)
        layer = PackedExperts(cases.workspace_of(cases.PLAIN_TIER), EXPERTS, 160, 96, in_place=True)
        layer.load_all(0, [tuple(w.clone() for w in expert) for expert in experts])
        before = run(layer, 5)
        file.truncate(8192)
        with pytest.raises(CheckpointError, match="shorter"):
            layer.load_all(0, experts)
        assert torch.equal(run(layer, 5), before)  # those that were there are used as before
        empty = PackedExperts(cases.workspace_of(cases.PLAIN_TIER), EXPERTS, 160, 96, in_place=True)
        with pytest.raises(CheckpointError, match="shorter"):
            empty.load_all(0, experts)
        assert empty.loaded == 0


# -- when it is done ---

BF16 = StoredFormats(experts=StoredFormat(name="bf16"))
THERE = replace(BF16, in_memory=True)
TIGHT = {"free": 0.9, "max_total_tokens": 512}


def planned(stored: StoredFormats = BF16, free: float = 16, **flags: object):
    return resolve(EngineConfig(model="m", **flags), MODEL, machine(free=int(free * GIB)), stored)


def test_experts_stay_in_memory_where_there_is_no_room_for_a_copy() -> None:
    assert not planned(THERE).experts_in_place  # there is room, and packed ones are faster
    tight = planned(THERE, **TIGHT)
    assert tight.experts_in_place
    assert not tight.fuse_shared_experts
    assert "no room" in reason(tight, "experts")
    with pytest.raises(ConfigError, match="does not fit"):
        planned(BF16, **TIGHT)


@pytest.mark.parametrize("free", [1.1, 1.2, 1.3, 1.4, 1.6, 2, 3])
def test_more_memory_never_gives_less_context(free: float) -> None:
    plan = planned(THERE, free=free)
    assert plan.context_length == MODEL.max_positions
    assert plan.experts_in_place == (
        planned(BF16, free=free).context_length < MODEL.max_positions if free > 1.3 else True
    )


def test_a_model_that_does_not_fit_says_what_keeps_its_experts_from_being_used_there() -> None:
    for stored, flags, text in (
        (replace(THERE, experts=StoredFormat(name="f16")), {}, "are f16"),
        (THERE, {"map_experts": "never"}, "--map-experts never was given"),
        (THERE, {"packed_cache": "/tmp/x"}, "--packed-cache"),
    ):
        with pytest.raises(ConfigError, match=f"does not fit.*could be used there, but.*{text}"):
            planned(stored, **TIGHT, **flags)
    with pytest.raises(ConfigError, match="--max-total-tokens") as caught:  # in place, only this is too much
        planned(THERE, free=0.9, max_total_tokens=10**7)
    assert "does not fit" not in str(caught.value)


@pytest.mark.parametrize(
    ("stored", "flags", "text"),
    [
        (BF16, {"kt_method": "INT8"}, "--kt-method makes the experts int8"),
        (BF16, {"dtype": "float32"}, "--dtype makes the experts f32"),
        (BF16, {"packed_cache": "/tmp/x"}, "--packed-cache"),
        (BF16, {"kt_enable_dynamic_expert_update": True}, "--kt-enable-dynamic-expert-update"),
        (replace(BF16, aligned=False), {}, "odd places"),
        (StoredFormats(experts=StoredFormat(name="bf16 + f16")), {}, "are bf16 \\+ f16"),
    ],
)
def test_always_says_what_is_against_it(stored: StoredFormats, flags: dict[str, object], text: str) -> None:
    assert planned(map_experts="always").experts_in_place
    with pytest.raises(ConfigError, match=text):
        planned(stored, map_experts="always", **flags)


def test_which_files_lie_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    monkeypatch.setattr(in_place, "_file_systems", lambda: {file.stat().st_dev: "tmpfs"})
    assert in_place.lie_in_memory([file])
    assert not in_place.lie_in_memory([])
    monkeypatch.setattr(in_place, "_file_systems", lambda: {file.stat().st_dev: "ext4"})
    assert not in_place.lie_in_memory([file])
    monkeypatch.undo()
    shm = Path("/dev/shm")
    if shm.is_dir() and "/dev/shm tmpfs" in Path("/proc/mounts").read_text():
        assert in_place._file_systems()[shm.stat().st_dev] == "tmpfs"


# -- whole models ---


def share_missing(matrices: Iterable[Tensor]) -> float:
    """Of the matrices' pages, those that this process has not mapped."""
    missing, pages = 0, 1
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        for matrix in matrices:
            first, last = matrix.data_ptr() // 4096, (matrix.data_ptr() + matrix.nbytes - 1) // 4096
            pagemap.seek(8 * first)
            entries = torch.frombuffer(bytearray(pagemap.read(8 * (last - first + 1))), dtype=torch.int64)
            missing, pages = (
                missing + int((entries >= 0).sum()),
                pages + len(entries),
            )  # the upper bit: present
    return missing / pages


@pytest.mark.parametrize("mode", ["always", "never"])
def test_pages_of_experts_stay_and_others_are_let_go_of(demo_dir: Path, mode: str) -> None:
    config = EngineConfig(
        model=str(demo_dir), device="cpu", max_total_tokens=256, kt_cpuinfer=2, map_experts=mode
    )
    parts = load_parts(config)
    assert parts.plan.experts_in_place == (mode == "always")
    layers = [layer.moe.experts._layer for layer in parts.model.layers if layer.moe is not None]
    assert {layer.in_place for layer in layers} == {mode == "always"}
    matrices = [matrix for layer in layers for expert in layer._used.values() for matrix in expert]
    assert bool(matrices) == (mode == "always")
    assert share_missing(matrices) < 0.05  # where others share a page, maybe a huge one, and were let go of


def test_the_demo_model_answers_the_same(demo_dir: Path) -> None:
    def answer(mode: str) -> object:
        llm = LLM(
            str(demo_dir), max_total_tokens=256, kernel_tier=cases.PLAIN_TIER, kt_cpuinfer=2, map_experts=mode,
            disable_shared_experts_fusion=True,
        )  # fmt: skip
        [result] = llm.generate([[5, 9, 250, 17]], SamplingParams(temperature=0.0, max_tokens=8, logprobs=1))
        return result.token_ids, result.logprobs

    assert answer("always") == answer("never")


def test_pages_of_everything_else_are_let_go_of_under_any_names(tiny_models, tmp_path: Path) -> None:
    """DeepSeek's inference names are not those that files are asked by."""
    model = save_deepseek_names(tiny_models["deepseek_v3"], tmp_path / "names")
    checkpoint = open_checkpoint(model)
    checkpoint.release(experts=False)
    files, aligned = checkpoint.expert_files()
    assert files
    assert aligned
