"""Which experts the next layer will probably choose, while this one's are being computed.

A layer adds little to the residual stream, so the next layer's router, asked about the stream as it is before this
layer's experts and the next attention have added theirs, names most of those that it will choose in the end (Eliseev
and Mazur, 2023, "Fast inference of Mixture-of-Experts language models with offloading").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from tandem.kernels.ops import Ops
from tandem.models.layers import DecoderLayer
from tandem.models.moe import MoEBlock

FeedForward = Callable[[Tensor, Tensor], Tensor]  # of normed rows and the residual stream they were made of


def feed_forwards(ops: Ops, layers: Sequence[DecoderLayer], eps: float) -> list[FeedForward]:
    """Every layer's. Those that are followed by a layer with experts ask its router in the meantime."""
    following = [*layers[1:], None]
    return [_feed_forward(ops, *pair, eps) for pair in zip(layers, following, strict=True)]


def _feed_forward(ops: Ops, layer: DecoderLayer, following: DecoderLayer | None, eps: float) -> FeedForward:
    block, later = layer.mlp, None if following is None else following.mlp
    if following is None or not isinstance(block, MoEBlock) or not isinstance(later, MoEBlock):
        return lambda x, _: layer.mlp(x)
    if later.router.num_groups > 1:  # chosen by many small operations on a GPU
        return lambda x, _: layer.mlp(x)
    return partial(_foreseeing, ops, block, later, following.mlp_norm, eps)


def _foreseeing(
    ops: Ops, block: MoEBlock, following: MoEBlock, norm: Tensor, eps: float, x: Tensor, residual: Tensor
) -> Tensor:
    if not following.experts.takes_hints(len(x)):
        return block(x)
    return block(x, lambda: following.foresee(ops.rms_norm(residual, norm, eps)))
