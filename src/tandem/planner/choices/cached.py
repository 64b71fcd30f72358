"""`--kv-cache-dtype`: keys and values in fewer bits than activations have. Lossy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.machine.gpus import Gpu
from tandem.mechanisms.cost import cost_of
from tandem.spec.layers import Layer
from tandem.spec.model_config import ModelConfig

FLAG, FIELDS = "--kv-cache-dtype", ("kv_cache_dtype",)
FP8 = "fp8_e4m3"
STORED_AS = "float8_e4m3fn"  # PyTorch's name of it: 448 is the largest number, larger ones become it
LEAST_CAPABILITY = (8, 9)  # Ada: whose instructions convert it


def cached_as(config: EngineConfig, model: ModelConfig) -> ModelConfig:
    """With keys and values as they were asked for."""
    if config.kv_cache_dtype != FP8:
        return model
    return replace(model, layers=tuple(map(_layer, model.layers)))


def _layer(layer: Layer) -> Layer:
    bodies = (cost_of(block.body).with_cache(STORED_AS) or block.body for block in layer.blocks)
    blocks = (replace(block, body=body) for block, body in zip(layer.blocks, bodies, strict=True))
    return replace(layer, blocks=tuple(blocks))


def cached_text(
    config: EngineConfig, model: ModelConfig, dtype: str, gpu: Gpu | None, why_no_gpu: str
) -> list[tuple[str, str]]:
    """The plan's line on an FP8 KV cache; [] where none was asked for. Raises ConfigError where it cannot be."""
    cache_dtype = config.kv_cache_dtype
    if cache_dtype in ("bf16", "bfloat16") and dtype != "bfloat16":
        raise _refused(f"the KV cache has the activations' dtype, {dtype}; leave it out, or take --dtype bfloat16")
    if cache_dtype != FP8:
        return []
    if gpu is None:
        raise _refused(f"the CPU reads keys in the activations' dtype ({why_no_gpu}); leave it out")
    if gpu.capability is not None and gpu.capability < LEAST_CAPABILITY:
        has = ".".join(map(str, gpu.capability))
        raise _refused(f"{gpu.name} has compute capability {has}, and 8.9 or newer converts it; leave it out")
    if config.attention_backend not in ("auto", "triton"):
        raise _refused(f"{config.attention_backend} does not read it; take --attention-backend triton")
    keeps = [cost_of(mixer).with_cache(STORED_AS) for mixer in model.mixers]
    if model.foreign is not None or not keeps or None in keeps:
        raise _refused("it is for keys and values of grouped-query attention, and this model keeps other states")
    return [(FP8, f"{FLAG}, lossy; kt quality measures it")]


def cached_notices(config: EngineConfig, gpu: Gpu | None) -> Iterator[str]:
    """Start-up's warning that an FP8 KV cache is lossy."""
    if config.kv_cache_dtype == FP8 and gpu is not None:
        yield f"{FLAG} {FP8} is lossy; what it does to answers says: kt quality {config.model} {FLAG} {FP8}"


def _refused(why: str) -> ConfigError:
    return ConfigError(f"{FLAG}: {why}", fields=FIELDS)
