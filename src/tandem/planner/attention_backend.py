"""Which kernels compute attention on a GPU: the only place that chooses, and that says what is missing."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.machine.machine import Machine
from tandem.mechanisms.cost import KeyShape, cost_of
from tandem.spec.layers import Attention
from tandem.spec.model_config import ModelConfig, why_alone
from tandem.spec.state import Pages

FLAG = "--attention-backend"
FIELDS = ("attention_backend",)
TORCH_LEAST = (2, 13)  # whose torch.nn.attention.varlen reads pages through a block table
TORCH_PAGE = 256  # tokens: a page must be a multiple of this many (PyTorch's flash_api.cpp)
TORCH_LARGEST_HEAD = 256
FLASHINFER_LEAST = (0, 5)
FLASHINFER_HEADS = (64, 128, 256)


def attention_backend(
    config: EngineConfig, mixers: tuple[Attention, ...], machine: Machine
) -> tuple[str, str]:
    """The backend's name, and why. Raises ConfigError when what was asked for cannot run."""
    backend = "torch" if config.attention_backend == "torch_native" else config.attention_backend
    if not mixers:
        return "triton", f"Transformers' modules ask for windows of their own; {FLAG} changes nothing"
    if backend != "auto" and (why := own_kernels(mixers)):
        return "triton", f"{why}; {FLAG} changes nothing"
    if backend in ("torch", "flashinfer") and any(each.sinks for each in keys_of(mixers)):
        raise ConfigError(f"{FLAG} {backend} has no sinks, which this model's softmax counts; take {FLAG} triton")
    if backend in ("torch", "flashinfer") and any(each.value_dim != each.dim for each in keys_of(mixers)):
        raise ConfigError(
            f"{FLAG} {backend} needs values as wide as keys; this model's are narrower; take {FLAG} triton"
        )
    if backend == "torch":
        _check_torch(config, mixers, machine.torch)
    if backend == "flashinfer":
        _check_flashinfer(mixers, machine.flashinfer)
    if backend == "auto":
        return "triton", "Tandem's own kernels; any page size"
    return backend, FLAG


def own_kernels(mixers: Sequence[object]) -> str:
    """Why this attention runs in Tandem's kernels whatever is asked for; "" where there is a choice. No error: the
    tutorials of DeepSeek-V3 and V4 ask for flashinfer."""
    return next(filter(None, (cost_of(mixer).own_kernels for mixer in mixers)), "")


def keys_of(mixers: Sequence[object]) -> list[KeyShape]:
    """Shapes of the keys that these mixers attend to; mixers without keys are left out."""
    return [keys for mixer in mixers if (keys := cost_of(mixer).keys) is not None]


def _check_torch(config: EngineConfig, mixers: tuple[Attention, ...], version: str) -> None:
    if release(version) < TORCH_LEAST:
        least = ".".join(map(str, TORCH_LEAST))
        raise ConfigError(
            f"{FLAG} torch needs PyTorch {least} or newer (torch.nn.attention.varlen with a block table), this is "
            f"{version or 'an unknown version'}; pip install 'torch>={least}', or take {FLAG} triton",
            fields=FIELDS,
        )
    if config.page_size % TORCH_PAGE:
        raise ConfigError(
            f"{FLAG} torch reads pages of a multiple of {TORCH_PAGE} tokens, not {config.page_size}; "
            f"give --page-size {TORCH_PAGE}, or take {FLAG} triton",
            fields=FIELDS,
        )
    wrong = [dim for dim in _head_dims(mixers) if dim % 8 or dim > TORCH_LARGEST_HEAD]
    if wrong:
        raise ConfigError(
            f"{FLAG} torch needs heads of a multiple of 8 and at most {TORCH_LARGEST_HEAD} channels, not "
            f"{_listed(wrong)}; take {FLAG} triton",
            fields=FIELDS,
        )


def _check_flashinfer(mixers: tuple[Attention, ...], version: str) -> None:
    if release(version) < FLASHINFER_LEAST:
        least = ".".join(map(str, FLASHINFER_LEAST))
        state = f"this is {version}" if version else "which is not installed"
        raise ConfigError(
            f"{FLAG} flashinfer needs the package flashinfer-python {least} or newer, {state}; pip install "
            f"'flashinfer-python>={least}' (its kernels are compiled at the first start, which takes nvcc and ninja), "
            f"or take {FLAG} triton",
            fields=FIELDS,
        )
    windows = sorted({each.window for each in keys_of(mixers)})
    dims = _head_dims(mixers)
    counts = sorted({(each.heads, each.kv_heads) for each in keys_of(mixers)})
    if len(counts) > 1:
        raise ConfigError(
            f"{FLAG} flashinfer needs as many heads in every layer; this model has (heads, kv heads) "
            f"{_listed(counts)}; take {FLAG} triton",
            fields=FIELDS,
        )
    if set(dims) - set(FLASHINFER_HEADS) or len(dims) > 1 or len(windows) > 1:
        raise ConfigError(
            f"{FLAG} flashinfer needs heads of {' or '.join(map(str, FLASHINFER_HEADS))} channels and one window for "
            f"all layers; this model has heads of {_listed(dims)} and windows of {windows}; take {FLAG} triton",
            fields=FIELDS,
        )


def _head_dims(mixers: tuple[Attention, ...]) -> list[int]:
    return sorted({each.dim for each in keys_of(mixers)})


def _listed(numbers: Sequence[object]) -> str:
    return ", ".join(map(str, numbers))


def release(version: str) -> tuple[int, int]:
    """(2, 13) of "2.13.0+cu130"; (0, 0) of what is no version."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def why_unread(model: ModelConfig, most: int) -> str:
    """Why kernels that read keys of so many channels cannot read what Transformers' modules keep; "": they can."""
    if model.foreign is None:
        return ""
    if why_alone(model):
        return "families that run through Transformers' modules and cache run on the CPU"
    pages = (state for state in model.states if isinstance(state, Pages))
    widest = max((row.shape[-1] for state in pages for row in state.rows), default=0)
    return f"the GPU kernels read heads of at most {most} channels, not {widest}" if widest > most else ""
