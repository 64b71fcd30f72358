"""Memory of a GGUF file whose types differ by layer, and between gate, up and down, as UD files' do: planned, and used.

Real bytes of each layer count: on a CPU, and of whatever part a GPU would have. Packed experts have a few bytes more a
row than their codes, which is a hundredth of rows as short as here."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gguf_files import Kind, write_gguf
from plans import machine, with_gpu
from tandem import LLM, _core
from tandem.bench.memory_ledger import planned
from tandem.checkpoint import load_model_config, open_checkpoint
from tandem.experts.placement import place
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.cpu import PackedExperts
from tandem.planner.expert_sizes import ExpertSizes, expert_sizes
from tandem.planner.memory import MemoryRequest
from tandem.planner.resolve import resolve
from tandem.spec.model_config import STORED
from tiny import save_tokenizer

LAYERS, EXPERTS = 4, 16
GATES = Kind.Q4_K, Kind.Q2_K, Kind.IQ2_XXS, Kind.Q2_K
UPS = Kind.Q4_K, Kind.Q3_K, Kind.IQ2_XXS, Kind.Q5_K
DOWNS = Kind.Q6_K, Kind.Q3_K, Kind.IQ3_S, Kind.Q4_K
SIZES = {
    "hidden_size": 512, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "num_experts": EXPERTS, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "intermediate_size": 512,
    "vocab_size": 512, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip


def kind_of(name: str, array: np.ndarray) -> Kind:
    if array.ndim < 2 or "ffn_gate_inp" in name:
        return Kind.F32
    if "_exps" not in name:
        return Kind.Q6_K
    layer = int(name.split(".")[1])
    return (DOWNS if "down" in name else UPS if "up" in name else GATES)[layer]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ud")
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **SIZES)).save_pretrained(path)
    save_tokenizer(path)
    return write_gguf(path, path / "model-UD-Q2_K_XL.gguf", kind_of)


def sizes(file: Path, strategy: str = "uniform") -> ExpertSizes:
    config = EngineConfig(model=str(file), kt_expert_placement_strategy=strategy)
    stored = open_checkpoint(file).formats()
    return expert_sizes(MemoryRequest(config, load_model_config(file), machine(), "bfloat16", STORED, 1, stored))


def test_a_cpu_takes_what_is_planned(file: Path) -> None:
    """Each layer's experts within a hundredth; all that the core holds within three."""
    gc.collect()
    before = _core.buffer_bytes()
    llm = LLM(str(file), device="cpu", max_total_tokens=256, kt_cpuinfer=2)
    model, stored = load_model_config(file), open_checkpoint(file).formats()
    layers = [each for each in gc.get_objects() if type(each) is PackedExperts and each.num_experts == EXPERTS]
    assert len(layers) == LAYERS == len(set(sizes(file).each))
    assert sorted(each.bytes_per_expert for each in layers) == pytest.approx(sorted(sizes(file).each), rel=0.01)
    assert sum(each.own_memory()[1] for each in layers) == pytest.approx(sizes(file).total, rel=0.01)
    used, plan = _core.buffer_bytes() - before, planned(llm.engine.plan, model, stored).ram
    scratch = 2 * _core.SCRATCH_BYTES_PER_WORKER
    assert plan <= used + 0.03 * plan and used - scratch <= 1.03 * plan
    [ledger] = llm.engine.plan.ledgers
    experts = {entry.name: entry.nbytes for entry in ledger.entries}["experts"]
    assert experts == pytest.approx(sizes(file).total, rel=1e-4)


@pytest.mark.parametrize("strategy", ["uniform", "front-loading"])
def test_what_a_gpu_has_of_each_layer_is_summed(file: Path, strategy: str) -> None:
    """For every number of experts: the sum over the placement that the engine makes, and as many as fit."""
    found = sizes(file, strategy)
    for count in range(LAYERS * EXPERTS + 1):
        by_layer = place(strategy, LAYERS, EXPERTS, count).gpu_experts.sum(1).tolist()
        nbytes = sum(n * each for n, each in zip(by_layer, found.each, strict=True))
        assert found.gpu_bytes(count) == nbytes and found.ram_bytes(count) == found.total - nbytes
        assert found.fitting(nbytes) == count and found.fitting(nbytes + min(found.each) - 1) == count
        assert found.fitting(nbytes - 1) == max(0, count - 1)


def test_the_plan_of_a_gpu_has_the_real_bytes(file: Path) -> None:
    """Front-loading takes the first, large layer, and leaves the others."""
    model, stored = load_model_config(file), open_checkpoint(file).formats()
    for strategy in ("uniform", "front-loading"):
        config = EngineConfig(model=str(file), kt_gpu_experts_ratio=0.25, kt_expert_placement_strategy=strategy)
        found = sizes(file, strategy)
        parts = found.gpu_bytes(EXPERTS), found.ram_bytes(EXPERTS)
        if strategy == "front-loading":
            assert parts[0] == EXPERTS * found.each[0] == EXPERTS * found.largest
        request = MemoryRequest(config, model, with_gpu(), "bfloat16", STORED, 1, stored)
        assert expert_sizes(request) == found
        read = replace(stored, experts=replace(stored.experts, unread_by_gpu=""))
        plan = resolve(config, model, with_gpu(), read)
        gpu, ram = ({entry.name: entry.nbytes for entry in ledger.entries} for ledger in plan.ledgers)
        assert (gpu["experts"], ram["experts"]) == parts
        taken = planned(plan, model, read)
        assert taken.parts["experts"] == parts[1]
