"""Costs of images: bytes of the tower and of its activations, tokens of an image, operations."""

from __future__ import annotations

from tandem.flags.engine_config import EngineConfig
from tandem.planner.forecast.ledger import LedgerEntry
from tandem.planner.forecast.speeds import CORE_FLOPS, GPU_FLOPS, gpu_model
from tandem.spec.model_config import ModelConfig
from tandem.spec.state import DTYPE_BYTES
from tandem.spec.vision import CPU_PATCHES, GPU_PATCHES, Tower, image_turns

FEATURE_BYTES = 256 << 20  # of images that were seen, for whoever sends them again
GPU_IMAGE_TOKENS, CPU_IMAGE_TOKENS = 4096, 1024  # of an image, where nothing was asked
MEGAPIXEL = 1 << 20
PIXEL_SHARE = 32  # of free CPU memory, for pixels of requests
LEAST_PIXEL_BYTES, MOST_PIXEL_BYTES = 256 << 20, 2 << 30
GPU_SHARE = 0.5  # of what the maker says, that a tower gets
CORE_ATTENTION = {"scalar": 1e9, "avx2": 3e10}  # operations per second of a core
LATER_ATTENTION = 6e10  # of later tiers: 2 Zen 5 cores have 1.3e11


def image_tokens(config: EngineConfig, tower: Tower, gpu: bool) -> int:
    """Tokens of an image, at most."""
    usual = GPU_IMAGE_TOKENS if gpu else CPU_IMAGE_TOKENS
    return min(config.image_max_tokens or usual, tower.processor.max_pixels // tower.processor.side**2)


def image_entries(
    config: EngineConfig, model: ModelConfig, dtype: str, step_tokens: int, gpu: bool
) -> list[LedgerEntry]:
    """Ledger entries of images, all on the device that computes steps; [] where no image is read."""
    tower = model.vision
    if tower is None:
        return []
    tokens, each = image_tokens(config, tower, gpu), DTYPE_BYTES[dtype]
    features = max(FEATURE_BYTES, tokens * feature_bytes(tower, dtype))
    scratch = scratch_bytes(tower, tokens, dtype, gpu) + turn_bytes(tower, step_tokens)
    return [
        LedgerEntry("vision tower", tower_params(tower) * each + tower.side**2 * tower.hidden * 4, "reads images"),
        LedgerEntry("image features", features, "of images that were seen, at most"),
        LedgerEntry("image scratch", scratch, f"of an image of {tokens} tokens"),
    ]


def pixel_bytes(free: int) -> int:
    """Bytes of the resized images of requests that the server keeps, at most. free: CPU memory."""
    return min(MOST_PIXEL_BYTES, max(LEAST_PIXEL_BYTES, free // PIXEL_SHARE))


def pixel_entries(model: ModelConfig, free: int) -> list[LedgerEntry]:
    """Ledger entry of CPU memory for them, whatever computes steps; [] where no image is read."""
    words = "of requests, resized, at most; the server's"
    return [] if model.vision is None else [LedgerEntry("images of requests", pixel_bytes(free), words)]


def tower_params(tower: Tower) -> int:
    """Weights, without learned positions, which stay float32."""
    p, hidden, width = tower.processor, tower.hidden, tower.width
    patch = hidden * (3 * p.temporal * p.patch**2 + 1)
    block = 4 * hidden * (hidden + 1) + 2 * hidden * width + width + hidden + 4 * hidden
    wide = hidden * p.merge**2
    merger = wide * (wide + 1) + tower.out * (wide + 1)
    norms = 2 * hidden + 2 * wide * len(tower.deep)
    return patch + tower.depth * block + tower.levels * merger + norms


def feature_bytes(tower: Tower, dtype: str) -> int:
    """Feature bytes of one image token."""
    return tower.out * tower.levels * DTYPE_BYTES[dtype]


def scratch_bytes(tower: Tower, tokens: int, dtype: str, gpu: bool) -> int:
    """Scratch bytes of an image's pass at its widest: as pixels, in a block's attention, or in its feed-forward.

    Both compute a tile of patches at once.
    """
    p, each, hidden = tower.processor, DTYPE_BYTES[dtype], tower.hidden
    patches, pixel = tokens * p.merge**2, 3 * p.patch**2
    tile = min(patches, GPU_PATCHES if gpu else CPU_PATCHES)
    pixels = tile * pixel * (12 + p.temporal * (4 + each)) + patches * each * hidden
    rows = 8 if gpu else 11  # measured on an H200: 6.4 at 16,384 patches
    attention = patches * rows * each * hidden + tile * 12 * hidden  # float32 where rows are turned
    feeding = patches * 7 * each * hidden + tile * 2 * each * tower.width
    return patches * 2 * pixel + max(pixels, attention, feeding)


def turn_bytes(tower: Tower, step_tokens: int) -> int:
    """Bytes of the rows of rotary tables that images add behind the context's."""
    return image_turns(tower, step_tokens) * len(tower.axes) * 2 * DTYPE_BYTES["float32"]


def image_flops(tower: Tower, pixels: int = MEGAPIXEL) -> tuple[float, float]:
    """Operations of an image of `pixels` pixels: of products with weights, and of attention."""
    patches = pixels / tower.processor.patch**2
    together = tower.processor.merge**2
    wide = tower.hidden * together
    merging = tower.levels * wide * (wide + tower.out)
    linear = 2 * patches * (tower_params(tower) - merging + merging / together)
    return linear, 4 * patches**2 * tower.hidden * tower.depth


def image_seconds(tower: Tower, tier: str, threads: int, gpu: str) -> float:
    """Seconds of an image of a megapixel, about. gpu: its name; "": the CPU computes."""
    linear, attention = image_flops(tower)
    if gpu:
        known = gpu_model(gpu)
        return (linear + attention) / GPU_SHARE / (GPU_FLOPS if known is None else known.flops)
    seeing = CORE_ATTENTION.get(tier, LATER_ATTENTION)
    return (linear / CORE_FLOPS[tier] + attention / seeing) / max(1, threads)
