"""Which kernel runs for how many rows: one answer, which both sides follow and `kt bench kernels --explain` prints."""

from __future__ import annotations

from itertools import pairwise

import pytest
from typer.testing import CliRunner

from tandem import _core
from tandem.bench.formats import FORMATS
from tandem.bench.kernels.experts import parse_shape
from tandem.bench.kernels.explain import GPU, chosen
from tandem.cli.app import app
from tandem.kernels.which import (
    CODES_PAIRS,
    FEW_TOKENS,
    MANY_PAIRS,
    MANY_TOKENS,
    PLAIN_PAIRS,
    WGMMA_LEAST_PAIRS,
    WGMMA_PAIRS,
    ExpertPath,
    Reads,
    by_warpgroups,
    cpu_kernel,
    gpu_way,
)

CODES = Reads(mma=True, prompts=True)


@pytest.mark.parametrize("tier", _core.supported_tiers())
@pytest.mark.parametrize("fmt", ["bf16", "int4", "int8", "fp8", "fp4"])
def test_a_cpu_changes_kernels_once(tier: str, fmt: str) -> None:
    workspace = _core.Workspace(_core.WorkerPool([-1]), tier)
    least = workspace.tile_from_rows(fmt)
    names = [cpu_kernel(workspace, fmt, rows).name for rows in range(1, least + 3)]
    assert names == ["dot_rows"] * (least - 1) + ["tile_mm"] * 3
    forced = _core.Workspace(_core.WorkerPool([-1]), tier, tile_from_rows=3)
    assert [cpu_kernel(forced, fmt, rows).name for rows in (2, 3)] == ["dot_rows", "tile_mm"]


def test_a_gpu_goes_from_pairs_to_tiles_to_unpacked_weights() -> None:
    few, tiles = FEW_TOKENS * 8, MANY_PAIRS * 128
    assert gpu_way(FEW_TOKENS, few, 128, CODES) is ExpertPath.MMA
    assert gpu_way(FEW_TOKENS, few, 128, Reads(False, True)) is ExpertPath.ROWS
    assert gpu_way(FEW_TOKENS + 1, few + 8, 128, CODES) is ExpertPath.TILES
    assert gpu_way(MANY_TOKENS * 9, tiles, 128, CODES) is ExpertPath.PROMPTS
    assert gpu_way(MANY_TOKENS * 9, tiles, 128, Reads(True, False)) is ExpertPath.TILES
    assert gpu_way(MANY_TOKENS * 9, tiles - 1, 128, CODES) is ExpertPath.TILES
    assert gpu_way(MANY_TOKENS - 1, tiles, 2, CODES) is ExpertPath.TILES


def test_codes_of_many_rows_are_decoded_in_registers_where_they_can_be() -> None:
    """In graphs, too; up to so many rows an expert that unpacking them once is faster."""
    most = CODES_PAIRS * 128
    for unpacks in (True, False):
        reads = Reads(True, unpacks, codes=True)
        assert gpu_way(FEW_TOKENS, FEW_TOKENS * 8, 128, reads) is ExpertPath.MMA
        assert gpu_way(FEW_TOKENS + 1, FEW_TOKENS * 8 + 8, 128, reads) is ExpertPath.CODES
        assert gpu_way(most // 8, most, 128, reads) is ExpertPath.CODES
        assert gpu_way(most // 8 + 1, most + 8, 128, reads) is (ExpertPath.PROMPTS if unpacks else ExpertPath.TILES)


def test_bfloat16_is_multiplied_as_it_lies_while_rows_are_few() -> None:
    most = PLAIN_PAIRS * 128
    reads = Reads(False, True, codes=True, plain=True)
    assert gpu_way(FEW_TOKENS, FEW_TOKENS * 8, 128, reads) is ExpertPath.ROWS
    assert gpu_way(FEW_TOKENS + 1, FEW_TOKENS * 8 + 8, 128, reads) is ExpertPath.CODES
    assert gpu_way(most // 8, most, 128, reads) is ExpertPath.CODES
    assert gpu_way(most // 8 + 1, most + 8, 128, reads) is ExpertPath.TILES
    assert gpu_way(MANY_PAIRS * 16, MANY_PAIRS * 128, 128, reads) is ExpertPath.PROMPTS


@pytest.mark.parametrize("plain", [False, True])
def test_whole_warpgroups_take_more_rows_without_unpacking(plain: bool) -> None:
    reads = Reads(not plain, True, codes=True, plain=plain, wgmma=True)
    for each in (WGMMA_LEAST_PAIRS + 1, WGMMA_PAIRS):
        assert gpu_way(each * 16, each * 128, 128, reads) is ExpertPath.CODES
        assert by_warpgroups(each * 128, 128)
    assert gpu_way(WGMMA_PAIRS * 16 + 1, WGMMA_PAIRS * 128 + 8, 128, reads) is ExpertPath.PROMPTS
    few = gpu_way(WGMMA_LEAST_PAIRS * 16, WGMMA_LEAST_PAIRS * 128, 128, reads)
    assert few is (ExpertPath.PROMPTS if plain else ExpertPath.CODES)
    assert not by_warpgroups(WGMMA_LEAST_PAIRS * 128, 128)


def test_steps_before_the_start_meet_every_tile() -> None:
    """Their sizes grow by `STEP`. What a narrower window takes would be compiled while serving."""
    pytest.importorskip("triton")
    from tandem.engine.start.warm_kernels import STEP
    from tandem.kernels.gpu.prompts.code_product import MIDDLE, SMALL

    for last in (CODES_PAIRS, WGMMA_LEAST_PAIRS):
        edges = [1, *(edge for edge in (SMALL, MIDDLE) if edge < last), last]
        assert all(high >= STEP * low for low, high in pairwise(edges))
    assert WGMMA_PAIRS >= STEP * WGMMA_LEAST_PAIRS


def test_rows_of_bfloat16_are_explained() -> None:
    for shape, file in (("2048x768x128x8", "code_product"), ("2044x768x128x8", "expert_tiles")):
        (row,) = [each for each in chosen(parse_shape(shape), "bf16", [], (64,)) if each.place == GPU]
        assert row.kernel.name.endswith(file), row.kernel


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_format_has_an_answer(fmt: str) -> None:
    shape = parse_shape("2048x768x128x8")
    rows = list(chosen(shape, fmt, ["scalar"], (12, 4096)))
    assert [(row.place, row.tokens) for row in rows] == [
        ("scalar", 12),
        ("scalar", 4096),
        (GPU, 12),
        (GPU, 4096),
    ]
    assert all(row.kernel.why for row in rows)
    refused = {row.fmt for row in rows if row.kernel.name == "none"}
    assert refused == {fmt} & {"f32"}


def test_twelve_rows_of_int4_are_explained() -> None:
    asked = [
        "bench",
        "kernels",
        "--explain",
        "--shape",
        "q3",
        "--format",
        "int4",
        "--tokens",
        "12",
        "--tier",
        "scalar",
    ]
    result = CliRunner().invoke(app, asked, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert "dot_rows" in result.output and "kernels/gpu/mma/expert_mma" in result.output
