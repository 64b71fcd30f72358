"""`target_size`: how large an image becomes before it is cut into patches."""

from __future__ import annotations

import math

from tandem.engine.images.limits import MAX_RATIO


def target_size(
    height: int, width: int, side: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Height and width, multiples of `side`, whose product lies within the limits and whose ratio is nearly that of
    the image: Qwen's rule (`smart_resize` of its processors). Raises ValueError beyond MAX_RATIO."""
    if max(height, width) > MAX_RATIO * min(height, width):
        raise ValueError(f"its sides are {width} x {height} pixels, and one may be {MAX_RATIO} times the other at most")
    high, wide = (round(length / side) * side for length in (height, width))
    if high * wide > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        high, wide = (max(side, math.floor(length / shrink / side) * side) for length in (height, width))
    elif high * wide < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        high, wide = (math.ceil(length * grow / side) * side for length in (height, width))
    return high, wide
