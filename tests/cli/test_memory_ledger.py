"""What plans predict of memory, beside what packed weights take."""

from __future__ import annotations

import gc
import mmap
from dataclasses import replace
from time import monotonic

import pytest
import torch

from fake_model import fake_plan
from plans import gpu_plan
from tandem import _core
from tandem.architectures.load import config_from_dict
from tandem.bench.memory_ledger import UsedBytes, anonymous_bytes, memory_columns, planned
from tandem.engine.graphs.inputs import GraphInputs, GraphPlan
from tandem.engine.sampling.graph_masks import GraphMasks
from tandem.experts.eager_copies import EagerCopies
from tandem.experts.handoff_counts import HandoffSizes
from tandem.formats.codes import WeightCodes
from tandem.kernels.cpu import PackedExperts, PackedMatrix, Workspace
from tandem.planner.gpu_plan import dense_bytes
from tandem.planner.host_memory import HostShare, host_memory, pinned_bytes
from tandem.spec.model_config import ModelConfig, rope_bytes

MIB = 1 << 20
PATIENCE = 60.0
SHAPES = [(2048, 768), (4096, 1536), (7168, 2048), (2048, 512)]  # hidden, expert width of models people serve


def qwen3(hidden: int, width: int, layers: int = 1) -> ModelConfig:
    return config_from_dict(
        {
            "model_type": "qwen3_moe", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 32,
            "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
            "moe_intermediate_size": width, "intermediate_size": 3 * hidden, "norm_topk_prob": True,
            "vocab_size": 1000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        }
    )  # fmt: skip


@pytest.mark.parametrize(("hidden", "width"), SHAPES)
@pytest.mark.parametrize("fmt", ["bf16", "int8", "int4"])
def test_experts_take_what_is_planned(hidden: int, width: int, fmt: str) -> None:
    config = qwen3(hidden, width)
    layer = PackedExperts(
        Workspace(_core.WorkerPool([-1]), "scalar"), 1, config.hidden, config.moe.experts.width, fmt
    )
    assert layer.bytes_per_expert == pytest.approx(config.expert_bytes(fmt), rel=0.03)


@pytest.mark.parametrize("ratio", [0.0, 0.25, 1.0])
def test_experts_on_the_gpu_are_not_planned_in_ram(ratio: float) -> None:
    config = qwen3(2048, 768, layers=2)
    plan = fake_plan(dtype="bfloat16", expert_format="int4", num_pages=100, page_size=16)
    everyone = 2 * 128
    gpu = gpu_plan(round(ratio * everyone))
    there = planned(replace(plan, gpu=gpu), config)
    expert, kv = config.expert_bytes("int4"), 1600 * config.state_layout("bfloat16").token_bytes
    assert there.parts["experts"] == (1 - ratio) * everyone * expert
    assert there.ram == sum(there.parts.values()) and (there.ram > 0) == (ratio < 1)
    sums = plan.max_step_tokens * config.hidden * 4 if ratio < 1 else 0
    weights = dense_bytes(config, "bfloat16") + rope_bytes(config, plan.context_length)
    assert there.gpu == weights + ratio * everyone * expert + kv + sums
    here = planned(plan, config)
    assert here == UsedBytes(config.weight_bytes("bfloat16", "int4"), 0)


@pytest.mark.parametrize("hidden", [2048, 4096])
@pytest.mark.parametrize("fmt", ["fp8", "int4-g128", "mxfp4"])
def test_dense_codes_take_what_is_planned(hidden: int, fmt: str) -> None:
    """Attention's projections in GPU memory are these bytes."""
    pytest.importorskip("triton")
    from tandem.bench.stored import stored_as
    from tandem.bench.synthetic import SyntheticCheckpoint

    config, workspace = qwen3(hidden, 768), Workspace(_core.WorkerPool([-1]), "scalar")
    heads = (("q", 4096, hidden), ("k", 512, hidden), ("v", 512, hidden), ("o", hidden, 4096))
    checkpoint, taken = SyntheticCheckpoint(fmt), 0
    for name, rows, depth in heads:
        codes = checkpoint.weight(f"model.layers.0.self_attn.{name}_proj", (rows, depth))
        assert isinstance(codes, WeightCodes)
        taken += PackedMatrix.from_codes(workspace, codes).packed_bytes
    router, embedding = 128 * hidden * 2, 1000 * hidden * 2
    assert isinstance(checkpoint.weight("model.layers.0.mlp.gate", (128, hidden)), torch.Tensor)
    assert isinstance(checkpoint.weight("model.layers.0.mlp.experts.3.up_proj", (768, hidden)), torch.Tensor)
    expected = dense_bytes(config, "bfloat16", stored_as(config, fmt))
    assert taken + router + 2 * embedding == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("late", [False, True])
def test_what_the_handoff_pins_is_planned(late: bool) -> None:
    config, sizes = qwen3(2048, 768), HandoffSizes(16, 300, 2048, 8, late)
    share = HostShare(10, 1000, 3, step_tokens=300, graph_sizes=(4, 16), pages=0, top_k=8, live=True, deferred=late)
    host, copies = host_memory(config, share), EagerCopies(sizes, torch.device("cpu"))
    pinned = [t for t in vars(copies).values() if isinstance(t, torch.Tensor) and t is not copies._device_rows]
    mailbox = _core.mailbox_offsets(sizes.mailbox_tokens, sizes.hidden, sizes.top_k, late)[-1]
    assert host.handoff == sum(pinned_bytes(t.nbytes) for t in pinned) + pinned_bytes(mailbox)
    assert (host.experts, host.spare) == (118 * 1000, 1000)
    assert host.scratch == 3 * _core.SCRATCH_BYTES_PER_WORKER
    assert [pinned_bytes(n) for n in (1, 2, 3, 4096, 4097)] == [1, 2, 4, 4096, 8192]


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("on_gpu", [0, 128])
def test_what_graphs_inputs_pin_is_planned(on_gpu: int, windowed: bool) -> None:
    sizes, tables = (1, 3, 64), 2 if windowed else 1
    share = HostShare(on_gpu, 1000, 3, step_tokens=300, graph_sizes=sizes, pages=2561, top_k=8, tables=tables)
    model, device = qwen3(2048, 768), torch.device("cpu")
    inputs = [GraphInputs(size, GraphPlan(sizes, 2561, windowed=windowed), device) for size in sizes]
    masks = [GraphMasks(size, device) for size in sizes]
    assert host_memory(model, share).inputs == sum(pinned_bytes(each._host.nbytes) for each in (*inputs, *masks))


def test_an_engine_beside_a_gpu_takes_scratch_as_planned() -> None:
    """The same parts without a GPU: what the core holds is experts and scratch, to the byte."""
    gc.collect()  # or buffers of other tests are freed meanwhile
    before, config = _core.buffer_bytes(), qwen3(2048, 512)
    workspace = Workspace(_core.WorkerPool([-1, -1]), "scalar")
    layer = PackedExperts(workspace, 128, config.hidden, config.moe.experts.width, "int4", cpu_slots=5)
    weights = [torch.zeros(shape, dtype=torch.bfloat16) for shape in ((512, 2048), (512, 2048), (2048, 512))]
    layer.load(0, *weights)
    share = HostShare(123, layer.bytes_per_expert, 2, step_tokens=16, graph_sizes=(), pages=9, top_k=8)
    host = host_memory(config, share)
    assert _core.buffer_bytes() - before == host.experts  # no worker has had a task
    x, ids = torch.zeros(5, 2048, dtype=torch.bfloat16), torch.zeros(5, 1, dtype=torch.int32)
    until, taken = monotonic() + PATIENCE, 0
    while taken < host.scratch and monotonic() < until:  # until both have had one
        layer.forward(x, ids, torch.ones(5, 1))
        taken = _core.buffer_bytes() - before - host.experts
    assert host.scratch <= taken <= 1.1 * host.scratch  # and a few rows
    del layer, workspace
    assert _core.buffer_bytes() == before


def test_memory_is_seen() -> None:
    before = UsedBytes.now()
    held = mmap.mmap(
        -1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )  # not from the allocator, which may have kept as much
    held.write(bytes(64 * MIB))
    used = UsedBytes.now().since(before)
    assert used.ram == pytest.approx(64 * MIB, rel=0.05)
    columns = memory_columns(UsedBytes(64 * MIB, 0), used)
    assert columns["ram_ratio"] == pytest.approx(1, abs=0.05) and columns["gpu_ratio"] is None
    assert sum(used.parts.values()) == used.ram and used.parts["rest"] == pytest.approx(64 * MIB, rel=0.05)
    held.close()
    assert UsedBytes.now().since(before).ram < 8 * MIB


def test_status_is_read(tmp_path) -> None:
    file = tmp_path / "status"
    file.write_text("Name:\tkt\nVmRSS:\t  999 kB\nRssAnon:\t   512 kB\nRssFile:\t   1 kB\n")
    assert anonymous_bytes(file) == 512 << 10
