"""Arrays that kernels cannot take are refused with an error that says why; no call crashes the process."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import kernel_cases as cases
from tandem import _core
from tandem.errors import KernelError
from tandem.kernels.cpu import PackedExperts, PackedMatrix, Workspace

WORKSPACE = cases.workspace_of("scalar")
MATRIX = PackedMatrix(WORKSPACE, torch.ones(40, 100))
LAYER = PackedExperts(WORKSPACE, 4, 100, 40)
X = torch.ones(3, 100)
IDS, WEIGHTS = torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2)

BAD_CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "wrong K": (lambda: MATRIX(torch.ones(3, 99)), r"x has shape \[3, 99\]; expected \[any, 100\]"),
    "one dimension": (lambda: MATRIX._core.multiply(X[0], torch.ones(40)), "x has shape"),
    "float64": (lambda: MATRIX(X.double()), "float32, bfloat16, int32"),
    "integers": (lambda: MATRIX._core.multiply(X.int(), torch.ones(3, 40)), "expected float32|bfloat16 or"),
    "strided": (lambda: MATRIX(torch.ones(100, 3).T), "not contiguous"),
    "wrong out": (lambda: MATRIX._core.multiply(X, torch.ones(3, 41)), "out has shape"),
    "bias": (lambda: PackedMatrix(WORKSPACE, torch.ones(40, 100), torch.ones(39)), "bias has shape"),
    "format": (lambda: PackedMatrix(WORKSPACE, torch.ones(4, 4), None, "int3"), "f32, bf16, int8, int4"),
    "group": (lambda: PackedMatrix(WORKSPACE, torch.ones(4, 4), None, "int8", 48), "group size 48"),
    "int4 rows": (lambda: PackedMatrix(WORKSPACE, torch.ones(4, 4), None, "int4", 0), "int4 needs a group"),
    "tier": (lambda: Workspace(cases.pool_of(1), "avx1024"), "avx1024.*take one of"),
    "empty weight": (lambda: PackedMatrix(WORKSPACE, torch.ones(0, 4)), "cannot be packed"),
    "activation": (lambda: PackedExperts(WORKSPACE, 4, 8, 8, "bf16", "relu"), "unknown activation 'relu'"),
    "no experts": (lambda: PackedExperts(WORKSPACE, 0, 8, 8), "at least one expert"),
    "int64 ids": (lambda: LAYER.forward(X, IDS.long(), WEIGHTS), "ids: element type"),
    "weights": (lambda: LAYER.forward(X, IDS, WEIGHTS[:2]), "weights has shape"),
    "out rows": (lambda: LAYER.forward(X, IDS, WEIGHTS, out=torch.ones(2, 100)), "out has shape"),
    "expert shape": (
        lambda: LAYER.load(0, torch.ones(40, 99), torch.ones(40, 100), torch.ones(100, 40)),
        "gate has shape",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_arguments(name: str) -> None:
    call, message = BAD_CALLS[name]
    with pytest.raises(KernelError, match=message):
        call()


@pytest.mark.parametrize("expert", [-1, 4])
def test_expert_that_does_not_exist(expert: int) -> None:
    with pytest.raises(IndexError, match="no expert"):
        LAYER.load(expert, torch.ones(40, 100), torch.ones(40, 100), torch.ones(100, 40))


def test_something_that_is_no_array() -> None:
    with pytest.raises(TypeError, match="x is not an array"):
        MATRIX._core.multiply("text", torch.ones(3, 40))


def test_numpy_arrays_are_taken() -> None:
    out = np.zeros((3, 40), dtype=np.float32)
    core = _core.PackedMatrix(WORKSPACE, np.ones((40, 100), dtype=np.float32), None, "f32", 0)
    core.multiply(np.ones((3, 100), dtype=np.float32), out)
    assert (out == 100).all()


def test_read_only_output_is_refused() -> None:
    out = np.zeros((3, 40), dtype=np.float32)
    out.flags.writeable = False
    with pytest.raises(TypeError, match="out is not a writable array"):
        MATRIX._core.multiply(np.ones((3, 100), dtype=np.float32), out)
    MATRIX._core.multiply(np.ones((3, 100), dtype=np.float32), np.zeros((3, 40), dtype=np.float32))
