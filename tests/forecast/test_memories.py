"""What memories of constant size and short convolutions are forecast to take, kind by kind, against sums by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plans import GIB, machine
from tandem.bench.architectures import named_config
from tandem.flags.engine_config import EngineConfig
from tandem.machine.gpus import Gpu
from tandem.mechanisms.channel_delta.cost import CORRECT_SECONDS
from tandem.mechanisms.channel_delta.shape import ChannelDelta
from tandem.mechanisms.cost import cost_of
from tandem.mechanisms.short_conv.shape import ShortConv
from tandem.mechanisms.state_space.cost import SCAN_SECONDS
from tandem.mechanisms.state_space.shape import StateSpace
from tandem.planner.forecast.attention import attention_flops
from tandem.planner.forecast.prediction import GPU_ATTENTION_SHARE, Case, predict
from tandem.planner.forecast.speeds import Speeds
from tandem.planner.resolve import resolve
from tandem.spec.layers import Layer, Mixer
from tandem.spec.model_config import ModelConfig
from tandem.spec.norm import Norm
from tandem.spec.stored import StoredFormats

SPACE = StateSpace(64, 64, 8, 128, 4, Norm(1e-5))
DELTA = ChannelDelta(32, 128, 4, Norm(1e-5))
CONV = ShortConv(2048, 3)
KINDS = {"space": SPACE, "delta": DELTA, "conv": CONV}
MEMORY_BYTES = {"space": 4 * 64 * 128 * 64, "delta": 4 * 32 * 128 * 128, "conv": 0}
INPUTS_BYTES = {"space": 2 * 4 * (4096 + 2 * 1024), "delta": 2 * 4 * 3 * 4096, "conv": 2 * 3 * 2048}
FREE = Speeds(dram_gbps=1e9, cpu_flops=1e21, gpu_gbps=1e9, gpu_flops=1e21, pcie_gbps=1e9, kernel_seconds=0.0,
              launch_seconds=0.0)  # fmt: skip


def of(mixer: Mixer | None, count: int = 3) -> ModelConfig:
    """So many layers of attention, all but the first of which have `mixer` in its place."""
    model = named_config("qwen3-30b-a3b", None)
    plain = model.layers[0]
    own = plain if mixer is None else Layer((replace(plain.blocks[0], body=mixer), *plain.blocks[1:]))
    return replace(model, layers=(plain, *[own] * (count - 1)))


def case(mixer: Mixer | None, speeds: Speeds, gpu: bool, **flags: object) -> Case:
    cards = (Gpu("H100", 80 * GIB, 79 * GIB, "gen5 x16", capability=(9, 0)),) if gpu else ()
    host = replace(machine(), gpus=cards, total_memory=500 * GIB, available_memory=400 * GIB)
    flags = {"kt_gpu_experts_ratio": 1.0, "chunked_prefill_size": 2048} if gpu else flags
    config = EngineConfig.from_keywords("m", context_length=4096, **flags)
    return Case(of(mixer), StoredFormats(), resolve(config, of(mixer), host), speeds)


@pytest.mark.parametrize(
    ("kind", "row", "beside"),
    [  # products of a row, and of those with rows of its chunk
        ("space", 2 * 4096 * 128 + 4 * 6144, 8 * 128 + 4096),
        ("delta", 3 * 32 * 128 * 128 + 4 * 3 * 4096, 4 * 4096),
        ("conv", 3 * 2048 + 2048, 0),
    ],
)
@pytest.mark.parametrize("rows", [1, 64, 300])
def test_every_product_is_counted(kind: str, row: int, beside: int, rows: int) -> None:
    def own(chunked: bool) -> float:
        found, first = (attention_flops(model, rows, 500, chunked) for model in (of(KINDS[kind]), of(None, 1)))
        return (found - first) / 2

    assert own(False) == pytest.approx(2 * rows * row)
    assert own(True) == pytest.approx(2 * rows * (row + min(rows, 64) * beside))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 8])
def test_a_step_reads_what_is_kept_and_writes_memories_anew(kind: str, batch: int) -> None:
    made, none = (case(mixer, FREE, gpu=False) for mixer in (KINDS[kind], None))
    first = none.state_bytes(batch, 1000) / 3  # of the layer of attention
    each = 2 * MEMORY_BYTES[kind] + INPUTS_BYTES[kind]
    assert made.state_bytes(batch, 1000) == pytest.approx(first + 2 * batch * each)


@pytest.mark.parametrize("kind", KINDS)
def test_decode_steps_wait_for_small_kernels(kind: str) -> None:
    """On a GPU, in graphs: where nothing else takes time, these are left. On a CPU nothing is."""
    kernels = cost_of(KINDS[kind]).kernels
    assert (kernels == 0) == (kind == "conv")
    slow = replace(FREE, kernel_seconds=1e-6)
    more, less = (
        sum(predict(case(mixer, slow, gpu=True), (1,)).decode[1].parts.values()) for mixer in (KINDS[kind], None)
    )
    assert more - less == pytest.approx(2 * kernels * 1e-6, rel=1e-3, abs=1e-9)
    more, less = (
        sum(predict(case(mixer, FREE, gpu=False), (1,)).decode[1].parts.values()) for mixer in (KINDS[kind], None)
    )
    assert more == pytest.approx(less, abs=1e-9)


@pytest.mark.parametrize(
    ("kind", "waits"), [("space", 32 * SCAN_SECONDS), ("delta", 32 * CORRECT_SECONDS), ("conv", 0.0)]
)
def test_a_prompt_on_a_gpu_goes_from_chunk_to_chunk(kind: str, waits: float) -> None:
    """Beside its products, and beside what passes between kernels."""
    speeds, mixer = replace(FREE, gpu_gbps=3000.0, gpu_flops=6e14), KINDS[kind]
    found = predict(case(mixer, speeds, gpu=True), (1,), prompt=2048).prompt.parts["attention"]
    products = attention_flops(of(mixer), 2048, 0, True) / 6e14 / GPU_ATTENTION_SHARE
    passes = 2 * 2048 * mixer.chunk_row_bytes / 3e12
    assert found == pytest.approx(products + 2 * (waits + passes))
