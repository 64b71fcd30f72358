"""Arrays that kernels cannot take are refused with an error that says why; no call crashes the process."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

import kernel_cases as cases
from tandem import _core
from tandem.errors import KernelError
from tandem.kernels.cpu import PackedExperts, PackedMatrix, Workspace
from tandem.kernels.ops import ExpertBiases
from tandem.kernels.reference import TorchOps
from tandem.spec.activation import Activation

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
    "format": (lambda: PackedMatrix(WORKSPACE, torch.ones(4, 4), None, "int5"), "f32, bf16, int8, int4"),
    "group": (lambda: PackedMatrix(WORKSPACE, torch.ones(4, 4), None, "int8", 48), "group size 48"),
    "int4 rows": (lambda: PackedMatrix(WORKSPACE, torch.ones(4, 4), None, "int4", 0), "int4 needs a group"),
    "tier": (lambda: Workspace(cases.pool_of(1), "avx1024"), "avx1024.*take one of"),
    "empty weight": (lambda: PackedMatrix(WORKSPACE, torch.ones(0, 4)), "cannot be packed"),
    "activation": (
        lambda: PackedExperts(WORKSPACE, 4, 8, 8, "bf16", Activation("relu")),  # type: ignore[arg-type]
        "unknown activation 'relu'",
    ),
    "ungated": (
        lambda: PackedExperts(WORKSPACE, 4, 8, 40, "bf16", Activation("relu2")),
        "have a width of whole 32s, not of 40",
    ),
    "biases": (
        lambda: LAYER.set_biases(ExpertBiases(torch.ones(4, 40), torch.ones(4, 40), torch.ones(3, 100))),
        r"down biases has shape \[3, 100\]; expected \[4, 100\]",
    ),
    "no experts": (lambda: PackedExperts(WORKSPACE, 0, 8, 8), "at least one expert"),
    "int64 ids": (lambda: LAYER.forward(X, IDS.long(), WEIGHTS), "ids is int64; expected int32"),
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
    numbers = _core.WeightFormat("f32", 0, "f32")
    core = _core.PackedMatrix(WORKSPACE, [np.ones((40, 100), dtype=np.float32)], None, numbers)
    core.multiply(np.ones((3, 100), dtype=np.float32), out)
    assert (out == 100).all()
    ones, twos = np.full((40, 128), 1, dtype=np.int8), np.full((40, 4), 2, dtype=np.float32)
    codes = _core.Codes(ones, twos, None, "int8", 32, "f32")
    core = _core.PackedMatrix.from_codes(WORKSPACE, codes, 40, 128, None)
    core.multiply(np.ones((3, 128), dtype=np.float32), out)
    assert (out == 256).all()


class Lent:
    """Lends a copy of an array that lives only as long as whoever borrows it wants, and notes who had died by then."""

    def __init__(self, array: np.ndarray, lent: list[weakref.ref[np.ndarray]], dead: list[bool]) -> None:
        self.array, self.lent, self.dead = array, lent, dead

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **how: object) -> object:
        self.dead.extend(copy() is None for copy in self.lent)
        copy = self.array.copy()
        self.lent.append(weakref.ref(copy))
        return copy.__dlpack__(**how)


def test_borrowed_arrays_live_until_the_call_is_over() -> None:
    lent: list[weakref.ref[np.ndarray]] = []
    dead: list[bool] = []

    def lend(*shape: int, dtype: type = np.float32) -> Lent:
        return Lent(np.ones(shape, dtype=dtype), lent, dead)

    def indices(*values: int, dtype: type = np.int32) -> np.ndarray:
        return np.array(values, dtype=dtype)

    ops, place = _core.DenseOps(_core.WorkerPool([-1]), "scalar"), indices(0, dtype=np.int64)
    ops.rms_norm(lend(3, 8), lend(3, 8), lend(8), lend(3, 8), 1e-5)
    assert len(lent) == 4
    del lent[:]
    batch = _core.BatchView(place, place, indices(0, 1), indices(1), indices(0).reshape(1, 1), 4, 1)
    pages = lend(1, 4, 1, 8), lend(1, 4, 1, 8)
    norms, tables = (lend(8), lend(8)), (lend(4, 4), lend(4, 4))
    ops.rope_store(
        batch, _core.Heads(2, 1, 8, 8, 8), lend(1, 32), *tables, *norms, *pages, lend(1, 2, 8), 1e-5
    )
    assert len(lent) == 8
    del lent[:]
    rule = _core.Route(8, 2, 1, 1, 0, False, True, False, 1.0, 0.0)
    ops.route(rule, lend(3, 8), lend(8), lend(3, 2, dtype=np.int32), lend(3, 2))
    assert len(lent) == 4 and dead and not any(dead)


def test_an_expert_that_was_never_loaded_is_named() -> None:
    for layer in (PackedExperts(WORKSPACE, 4, 100, 40, "f32"), TorchOps().experts(4, 100, 40, "f32")):
        layer.load(0, torch.ones(40, 100), torch.ones(40, 100), torch.ones(100, 40))
        layer.forward(X, IDS, WEIGHTS)
        with pytest.raises(KernelError, match="expert 2 was routed to before it was loaded"):
            layer.forward(X, IDS + 2, WEIGHTS)


def test_read_only_output_is_refused() -> None:
    out = np.zeros((3, 40), dtype=np.float32)
    out.flags.writeable = False
    with pytest.raises(TypeError, match="out is not a writable array"):
        MATRIX._core.multiply(np.ones((3, 100), dtype=np.float32), out)
    MATRIX._core.multiply(np.ones((3, 100), dtype=np.float32), np.zeros((3, 40), dtype=np.float32))


@pytest.mark.parametrize("scales", ["f16", "e4m3", "e8m0", "bytes8"])
def test_numbers_are_not_packed_with_scales_that_nobody_writes(scales: str) -> None:
    workspace = _core.Workspace(_core.WorkerPool([-1]), "scalar")
    fmt = _core.WeightFormat("int8", 32, scales)
    with pytest.raises(ValueError, match="numbers are packed with f32 or bf16 scales"):
        _core.PackedMatrix(workspace, [torch.ones(32, 64)], None, fmt)
