"""Which activation an experts module has, found by feeding it numbers: names and attributes differ between families."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.spec.activation import Activation

VALUES = (-40.0, -12.0, -7.5, -3.0, -1.0, -0.4, 0.0, 0.3, 1.0, 2.0, 5.0, 9.0, 13.0, 40.0)
CLOSE = 1e-6  # of the largest result, in float64

Formula = Callable[[Tensor, Tensor], Tensor]


def activation_of(module: Any) -> Activation | None:
    """Activation that combines gate and up, or is applied to up where there is no gate; None: no known kind."""
    if not module.has_gate:
        return _of_up(module)
    gate, up = (each.flatten() for each in torch.meshgrid(_values(), _values(), indexing="ij"))
    try:
        got = _outputs(module, gate, up)
    except Exception:  # an activation with weights of its own, for example
        return None
    for activation, formula in _candidates(got):
        expected = formula(gate, up)
        if bool((got - expected).abs().max() <= CLOSE * expected.abs().max()):
            return activation
    return None


def _of_up(module: Any) -> Activation | None:
    """max(up, 0) squared, if it is that."""
    try:
        with torch.no_grad():
            got: Tensor = module.act_fn(_values())
    except Exception:  # whatever it has in that place
        return None
    close = torch.allclose(got, F.relu(_values()).square(), rtol=CLOSE, atol=CLOSE)
    return Activation("relu2") if close else None


def _values() -> Tensor:
    return torch.tensor(VALUES, dtype=torch.float64)


def _outputs(module: Any, gate: Tensor, up: Tensor) -> Tensor:
    """As the module lays out its rows: gate, then up, or by turns."""
    both = torch.cat((gate, up)) if module.is_concatenated else torch.stack((gate, up), dim=1).flatten()
    with torch.no_grad():
        got: Tensor = module._apply_gate(both[None])
    return got[0]


def _at(got: Tensor, gate: float, up: float) -> float:
    return float(got[VALUES.index(gate) * len(VALUES) + VALUES.index(up)])


def _candidates(got: Tensor) -> Iterator[tuple[Activation, Formula]]:
    yield Activation("silu"), lambda g, u: F.silu(g) * u
    yield Activation("gelu"), lambda g, u: F.gelu(g) * u
    yield Activation("gelu_tanh"), lambda g, u: F.gelu(g, approximate="tanh") * u
    limit = _at(got, 1.0, 40.0) * (1 + math.exp(-1.0))
    if 0 < limit < 40:
        limit = round(limit, 9)
        yield (
            Activation("swiglu_clamp", limit=limit),
            lambda g, u: F.silu(g.clamp(max=limit)) * u.clamp(-limit, limit),
        )
    share = _at(got, 1.0, 0.0)
    if 0 < share < 1:
        alpha = round(math.log(share / (1 - share)), 9)
        bound = round(_at(got, 1.0, 40.0) / share - 1, 9)
        yield (
            Activation("swiglu_oai", alpha, bound),
            lambda g, u: (u.clamp(-bound, bound) + 1) * (h := g.clamp(max=bound)) * torch.sigmoid(alpha * h),
        )
