"""typical_p and XTC: filters among the tokens that top_k, top_p and min_p have left."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tandem.engine.protocol import SamplingSettings

Places = npt.NDArray[np.intp]
Weights = npt.NDArray[np.float64]


def narrows(params: SamplingSettings) -> bool:
    return params.typical_p < 1.0 or params.xtc_probability > 0.0


def narrowed(scaled: npt.NDArray[np.float32], params: SamplingSettings, coin: float) -> Places:
    """Places that are left, ascending. scaled: logits / temperature, by ascending id, shifted by any constant.
    coin: a random number in [0, 1) that decides whether XTC acts on this token."""
    weights = np.exp(scaled.astype(np.float64) - float(scaled.max()))
    places = np.arange(len(scaled))
    if params.typical_p < 1.0:
        places = _typical(weights / weights.sum(), params.typical_p)
    if coin < params.xtc_probability:
        some = weights[places]
        places = places[_without_top(some / some.sum(), params.xtc_threshold)]
    return places


def _typical(probabilities: Weights, mass: float) -> Places:
    """Locally typical sampling (arXiv 2202.00666): the tokens whose information is nearest to the entropy, until they
    have `mass`. Of equals the lowest ids come first."""
    possible = np.flatnonzero(probabilities > 0.0)
    some = probabilities[possible]
    information = -np.log(some)
    order = np.argsort(np.abs(information - (some * information).sum()), kind="stable")
    reached = int(np.searchsorted(np.cumsum(some[order]), mass, side="left")) + 1
    places: Places = np.sort(possible[order[:reached]])
    return places


def _without_top(probabilities: Weights, threshold: float) -> Places:
    """XTC: of the tokens that reach the threshold, only the least probable stays; of equals, the one with the highest
    id. All that do not reach it stay."""
    top = np.flatnonzero(probabilities >= threshold)
    stays = np.ones(len(probabilities), dtype=np.bool_)
    if len(top) > 1:
        least = top[::-1][int(probabilities[top][::-1].argmin())]
        stays[top] = False
        stays[least] = True
    return np.flatnonzero(stays)
