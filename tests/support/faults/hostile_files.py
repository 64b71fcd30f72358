"""Reads checkpoints whose metadata says absurd things, as a start does, in a process of its own with bounded memory.

    python hostile_files.py CASES SCRATCH MODELS...

MODELS are GGUF files or model directories, which take turns. Prints a line of JSON for each case, whose number seeds
it: {"seed", "model", "damage", "outcome", "message", "seconds"}. A crash ends it early, with the last line missing.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import random
import resource
import shutil
import signal
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tandem.architectures.load import config_from_dict

SECONDS = 10
SPARE_BYTES = 1 << 30  # of address space over what Python and torch have mapped already
NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    255,
    65_535,
    10_001,
    1 << 20,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 40,
    (1 << 63) - 1,
)
REALS = (0.0, 1.0, -1.0, 0.5, 1e-45, 1e308, -1e308, math.inf, -math.inf, math.nan)
OTHERS: tuple[Any, ...] = (
    None, True, False, "", "x", "silu", "yarn", "full_attention", "A" * 5000, [], [1], [[1]], [None], {},
    {"a": 1}, [{}], 10**30,
)  # fmt: skip


# -- JSON ---

FILES = ("config.json",) * 5 + (
    "generation_config.json",
    "tokenizer_config.json",
    "model.safetensors.index.json",
    "hf_quant_config.json",
)


def damaged_directory(source: Path, target: Path, dice: random.Random) -> str:
    """A copy with one file whose values are changed, or whose text is no JSON. Returns what was done."""
    for file in source.iterdir():
        if file.suffix == ".safetensors":
            (target / file.name).symlink_to(file)
        else:
            shutil.copy(file, target / file.name)
    path = target / dice.choice(FILES)
    value = json.loads(path.read_text()) if path.exists() else copy.deepcopy(MADE[path.name])
    if dice.random() < 0.1:
        text = json.dumps(value).encode()
        at = dice.randrange(len(text) + 1)
        path.write_bytes(text[:at] + dice.randbytes(dice.randrange(4)) + text[at + dice.randrange(3) :])
        return f"{path.name}: the text at {at}"
    said = [_change(value, dice) for _ in range(dice.choice((1, 1, 1, 2, 4)))]
    path.write_text(json.dumps(value))
    return f"{path.name}: {'; '.join(said)}"


MADE: dict[str, Any] = {
    "model.safetensors.index.json": {
        "metadata": {"total_size": 1},
        "weight_map": {"lm_head.weight": "model.safetensors"},
    },
    "hf_quant_config.json": {
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None, "group_size": 128}
    },
}
ADDED = (
    "rope_scaling", "rope_theta", "quantization_config", "sliding_window", "layer_types", "mlp_layer_types", "n_group",
    "num_nextn_predict_layers", "partial_rotary_factor", "tie_word_embeddings", "head_dim", "text_config",
    "eos_token_id", "hidden_act", "temperature", "top_k", "added_tokens_decoder", "chat_template", "attention_bias",
    "model_type",
)  # fmt: skip
QUANTISED = (
    "quant_method",
    "bits",
    "group_size",
    "weight_block_size",
    "config_groups",
    "packing_format",
    "desc_act",
)


def _change(value: Any, dice: random.Random) -> str:
    """Change of a value somewhere inside: another one, none, or one more."""
    value.setdefault("model_type", "llama")
    holder, key = dice.choice(list(_places(value)))
    how = dice.random()
    if isinstance(holder, dict) and how < 0.15:
        holder.pop(key, None)
        return f"without {key}"
    if isinstance(holder, dict) and how < 0.3:
        key = dice.choice(ADDED)
        holder[key] = (
            {dice.choice(QUANTISED): hostile(dice) for _ in range(3)} if how < 0.2 else hostile(dice)
        )
        return f"{key} = {str(holder[key])[:60]}"
    if isinstance(holder[key], list) and how < 0.6:
        holder[key] = holder[key] * dice.choice((0, 2, 1000)) if how < 0.45 else [*holder[key], hostile(dice)]
        return f"{key} is a list of {len(holder[key])}"
    holder[key] = hostile(dice)
    return f"{key} = {str(holder[key])[:60]}"


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = (
        list(value)
        if isinstance(value, dict)
        else range(min(len(value), 8))
        if isinstance(value, list)
        else ()
    )
    for key in keys:
        yield value, key
        yield from _places(value[key])


def hostile(dice: random.Random) -> Any:
    return copy.deepcopy(dice.choice(dice.choice((NUMBERS, REALS, OTHERS))))


# -- GGUF ---

WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9


class Spot(NamedTuple):
    """Where a header has a number: of a value, a length, a count, a type."""

    name: str
    at: int
    kind: int


def spots(data: bytes) -> list[Spot]:
    """Every number of a whole file's header, and of arrays the first few."""
    found = [Spot("tensors", 8, 10), Spot("pairs", 16, 10)]
    tensors, pairs = struct.unpack_from("<QQ", data, 8)
    at = 24
    for _ in range(pairs):
        name, at = _text(data, at)
        found += [Spot(f"length of {name}", at - 8 - len(name), 10), Spot(f"type of {name}", at, 4)]
        at = _value(data, name, at + 4, struct.unpack_from("<I", data, at)[0], found)
    for _ in range(tensors):
        name, at = _text(data, at)
        (count,) = struct.unpack_from("<I", data, at)
        found.append(Spot(f"dimensions of {name}", at, 4))
        found += [Spot(f"dimension {i} of {name}", at + 4 + 8 * i, 10) for i in range(count)]
        at += 4 + 8 * count
        found += [Spot(f"kind of {name}", at, 4), Spot(f"offset of {name}", at + 4, 10)]
        at += 12
    return found


def _text(data: bytes, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", data, at)
    return data[at + 8 : at + 8 + length].decode(), at + 8 + length


def _value(data: bytes, name: str, at: int, kind: int, found: list[Spot]) -> int:
    """Returns where it ends."""
    if kind == STRING:
        found.append(Spot(f"length of the text of {name}", at, 10))
        return _text(data, at)[1]
    if kind != ARRAY:
        found.append(Spot(name, at, kind))
        return at + WIDTHS[kind]
    inner, count = struct.unpack_from("<IQ", data, at)
    found += [Spot(f"type of the elements of {name}", at, 4), Spot(f"count of {name}", at + 4, 10)]
    at += 12
    for index in range(count):
        kept: list[Spot] = []
        at = _value(data, f"{name}[{index}]", at, inner, kept)
        found += kept if index < 3 else []
    return at


FORMATS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<B",
    10: "<Q",
    11: "<q",
    12: "<d",
}


def damaged_gguf(source: Path, target: Path, dice: random.Random) -> str:
    """A copy whose header says something else. Returns what was done."""
    data = bytearray(source.read_bytes())
    known = spots(bytes(data))
    own = [spot for spot in known if "tokenizer." not in spot.name and " of " not in spot.name] or known
    said = []
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        spot = dice.choice(own if dice.random() < 0.6 else known)
        said.append(_overwrite(data, spot, dice))
    if dice.random() < 0.1:
        at = dice.randrange(known[-1].at)
        data[at] = dice.randrange(256)
        said.append(f"byte {at}")
    (target / "m.gguf").write_bytes(data)
    return "; ".join(said)


def _overwrite(data: bytearray, spot: Spot, dice: random.Random) -> str:
    layout = FORMATS[spot.kind]
    if layout in ("<f", "<d"):
        value: Any = dice.choice(REALS)
        value = math.copysign(math.inf, value) if abs(value) > 3e38 and layout == "<f" else value
    else:
        size, signed = struct.calcsize(layout), layout[1].islower()
        value = dice.choice(NUMBERS) & ((1 << 8 * size) - 1)
        value -= (1 << 8 * size) if signed and value >= 1 << (8 * size - 1) else 0
    struct.pack_into(layout, data, spot.at, value)
    return f"{spot.name} = {value}"


# -- what a start does with it ---


def start(model: Path) -> None:
    """Everything that `kt models`, `kt plan` and `kt serve` do with a model's files before it serves."""
    from tandem import models
    from tandem.checkpoint import load_model_config, open_checkpoint, resolve_model
    from tandem.engine.start.sampling_defaults import read_sampling_defaults
    from tandem.flags.engine_config import EngineConfig
    from tandem.kernels.reference import TorchOps
    from tandem.machine.machine import Machine
    from tandem.models.trial import check_headers
    from tandem.planner.resolve import resolve
    from tandem.text.tokenizer import Tokenizer

    path = resolve_model(model)
    config, machine = load_model_config(path), Machine.detect()
    checkpoint = open_checkpoint(path)
    wishes = EngineConfig(
        model=str(path), dtype="float32", device="cpu", context_length=64, max_total_tokens=128
    )
    plan = resolve(wishes, config, machine, checkpoint.formats())
    read_sampling_defaults(path)
    Tokenizer.load(path).encode("a")
    check_headers(config, plan, checkpoint)
    models.build(config, plan, checkpoint, TorchOps())


def outcome(model: Path) -> tuple[str, str]:
    from tandem.errors import TandemError

    signal.signal(signal.SIGALRM, _late)
    signal.alarm(SECONDS)
    try:
        start(model)
    except TandemError as error:
        return "refused", str(error)
    except BaseException as error:
        return type(error).__name__, f"{error} {_where(error)}"
    finally:
        signal.alarm(0)
    return "loaded", ""


def _where(error: BaseException) -> str:
    import traceback

    return " < ".join(
        f"{Path(f.filename).name}:{f.lineno}"
        for f in reversed(traceback.extract_tb(error.__traceback__)[-4:])
    )


def _late(*_: object) -> None:
    raise TimeoutError(f"more than {SECONDS} seconds")


def limit_memory() -> None:
    (pages,) = (int(Path("/proc/self/statm").read_text().split()[0]),)
    most = pages * resource.getpagesize() + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def import_late_modules(model: Path) -> None:
    """Before memory and time are bounded: what a whole model needs, and one that runs through Transformers."""
    from tandem.errors import TandemError

    with contextlib.suppress(TandemError):
        config_from_dict({"model_type": "gpt2"})
    start(model)


def main(cases: int, scratch: Path, sources: list[Path]) -> None:
    import torch

    torch.set_num_threads(1)
    import_late_modules(sources[0])
    limit_memory()
    for seed in range(cases):
        source, place = sources[seed % len(sources)], scratch / f"case-{seed}"
        place.mkdir()
        damage = (damaged_gguf if source.is_file() else damaged_directory)(source, place, random.Random(seed))
        began = time.monotonic()
        found, message = outcome(place / "m.gguf" if source.is_file() else place)
        said = {
            "seed": seed,
            "model": source.name,
            "damage": damage,
            "outcome": found,
            "message": message[-300:],
        }
        print(json.dumps(said | {"seconds": time.monotonic() - began}), flush=True)
        shutil.rmtree(place)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), [Path(each) for each in sys.argv[3:]])
