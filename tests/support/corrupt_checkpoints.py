"""Loads checkpoints that were damaged on purpose, in a process of its own with little memory and time.

    python corrupt_checkpoints.py MODEL SCRATCH SEEDS...

prints a line of JSON per seed: {"seed", "damage", "outcome", "message"}. A crash ends it early, with the last line
missing; a hang is ended by SIGALRM.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS = 60  # per case, on a machine that may be busy with other things
SPARE_BYTES = 1 << 30  # of address space over what Python and torch have mapped already
Damage = Callable[[Path, random.Random], str]
Header = dict[str, Any]


def read_header(file: Path) -> tuple[Header, bytes]:
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_header(file: Path, header: Header, body: bytes) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + body)


def tensors(header: Header) -> list[str]:
    return [name for name in header if name != "__metadata__"]


def shards(model: Path) -> list[Path]:
    return sorted(model.glob("*.safetensors"))


def same_meaning(a: bytes, b: bytes) -> bool:
    try:
        one, other = json.loads(a), json.loads(b)
    except ValueError:
        return False
    for header in (one, other):
        if isinstance(header, dict):
            header.pop("__metadata__", None)
    return one == other


def flip_header(model: Path, rng: random.Random) -> str:
    """One bit of the header, so that it means something else, or nothing."""
    file = rng.choice(shards(model))
    data = bytearray(file.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    before = bytes(data[8 : 8 + length])
    while True:
        at, bit = rng.randrange(8, 8 + length), 1 << rng.randrange(8)
        data[at] ^= bit
        if not same_meaning(before, bytes(data[8 : 8 + length])):
            file.write_bytes(data)
            return f"bit {bit} of byte {at}"
        data[at] ^= bit


def header_length(model: Path, rng: random.Random) -> str:
    file = rng.choice(shards(model))
    data = bytearray(file.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    absurd = [
        0,
        1,
        length - 1,
        length + 1,
        len(data),
        len(data) - 8,
        1 << 20,
        1 << 40,
        1 << 63,
        (1 << 64) - 1,
    ]
    value = rng.choice([v for v in absurd if v != length])
    data[:8] = struct.pack("<Q", value)
    file.write_bytes(data)
    return f"header length {value}"


def cut(model: Path, rng: random.Random) -> str:
    file = rng.choice(shards(model))
    data = file.read_bytes()
    keep = rng.choice([rng.randrange(len(data)), rng.randrange(200), len(data) - 1])
    file.write_bytes(data[:keep])
    return f"cut to {keep} bytes"


def grow(model: Path, rng: random.Random) -> str:
    file = rng.choice(shards(model))
    more = rng.randrange(1, 4000)
    file.write_bytes(file.read_bytes() + bytes(more))
    return f"{more} bytes more"


def dtype(model: Path, rng: random.Random) -> str:
    """Another type of the same or another size; a type that does not exist."""
    file = rng.choice(shards(model))
    header, body = read_header(file)
    name = rng.choice(tensors(header))
    header[name]["dtype"] = new = rng.choice(
        ["I32", "U32", "F64", "F16", "BF16", "I8", "F4", "F33", "", 7, None]
    )
    write_header(file, header, body)
    return f"{name} is {new!r}"


def shape(model: Path, rng: random.Random) -> str:
    """Absurd, empty, negative, transposed or merely wrong shapes."""
    file = rng.choice(shards(model))
    header, body = read_header(file)
    name = rng.choice([n for n in tensors(header) if len(header[n]["shape"]) == 2 and _oblong(header[n])])
    rows, columns = header[name]["shape"]
    shapes = [
        [columns, rows], [rows * columns], [rows, columns, 1], [1 << 62, 1 << 62], [1 << 32, 1 << 32], [-rows, columns],
        [0, columns], [], [rows * columns, 0], [rows + 1, columns], ["many", columns], [rows / 3, columns * 3], None,
        [1] * 5000, [(1 << 64) + rows, columns],
    ]  # fmt: skip
    header[name]["shape"] = new = rng.choice(shapes)
    write_header(file, header, body)
    return f"{name} has shape {str(new)[:60]}"


def _oblong(entry: Header) -> bool:
    return entry["shape"][0] != entry["shape"][1]


def offsets(model: Path, rng: random.Random) -> str:
    file = rng.choice(shards(model))
    header, body = read_header(file)
    name = rng.choice(tensors(header))
    begin, end = header[name]["data_offsets"]
    header[name]["data_offsets"] = new = rng.choice([
        [begin + 4, end + 4], [begin - 4, end - 4], [end, begin], [begin, end + (1 << 50)], [1 << 63, 1 << 63],
        [-1, end], [begin], [begin, end, end], "0", [begin, end - 2], [(1 << 64) - 8, (1 << 64) - 4], [1.5, 2.5],
    ])  # fmt: skip
    write_header(file, header, body)
    return f"{name} lies at {new}"


def names(model: Path, rng: random.Random) -> str:
    """A tensor that nobody asks for instead of one that is needed; one that is missing, with or without its bytes."""
    file = rng.choice(shards(model))
    header, body = read_header(file)
    name = rng.choice(tensors(header))
    how = rng.choice(["renamed", "left out", "cut out"])
    entry = header.pop(name)
    if how == "renamed":
        header[name + rng.choice("x.7é")] = entry
    if how == "cut out":
        begin, end = entry["data_offsets"]
        body = body[:begin] + body[end:]
        for other in tensors(header):
            if header[other]["data_offsets"][0] >= end:
                header[other]["data_offsets"] = [o - (end - begin) for o in header[other]["data_offsets"]]
    write_header(file, header, body)
    return f"{name} {how}"


def absurd_header(model: Path, rng: random.Random) -> str:
    """Text that is no header, is deeply nested, or describes very many tensors."""
    file = rng.choice(shards(model))
    kind = rng.choice(["nested", "many", "list", "binary", "twice"])
    header, body = read_header(file)
    name = tensors(header)[0]
    text = {
        "nested": b"[" * 200_000,
        "many": json.dumps({f"t{i}": header[name] for i in range(20_000)}).encode(),
        "list": b"[1, 2, 3]",
        "binary": rng.randbytes(5000),
        "twice": json.dumps(header).encode()[:-1] + b', "' + name.encode() + b'": ' + b'{"dtype": "F32"}}',
    }[kind]
    file.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return f"a header that is {kind}"


def index(model: Path, rng: random.Random) -> str:
    """The index of a model in two shards names other files, other tensors, or is no index."""
    path = model / "model.safetensors.index.json"
    text = path.read_text()
    content = json.loads(text)
    mapping = content["weight_map"]
    name, files = rng.choice(list(mapping)), sorted(set(mapping.values()))
    how = rng.choice(
        ["missing shard", "tensor nowhere", "cut", "outside", "list", "number", "empty"]
    )
    if how == "missing shard":
        (model / rng.choice(files)).unlink()
    elif how == "tensor nowhere":
        mapping[name + "x"] = files[0]
    elif how == "outside":
        mapping[name] = "../../../../etc/passwd"
    elif how == "list":
        content = [content]
    elif how == "number":
        mapping[name] = 1
    elif how == "empty":
        content["weight_map"] = {}
    path.write_text(text[: rng.randrange(len(text) - 2)] if how == "cut" else json.dumps(content))
    return f"index: {how} {name}"


SAFETENSORS: dict[str, Damage] = {
    d.__name__: d
    for d in (flip_header, header_length, cut, grow, dtype, shape, offsets, names, absurd_header, index)
}


def flip_gguf(model: Path, rng: random.Random) -> str:
    """A bit of what says where tensors lie: magic, version, counts."""
    data = bytearray(model.read_bytes())
    at, bit = rng.randrange(24), 1 << rng.randrange(8)
    data[at] ^= bit
    model.write_bytes(data)
    return f"bit {bit} of byte {at}"


def cut_gguf(model: Path, rng: random.Random) -> str:
    data = model.read_bytes()
    keep = rng.choice([rng.randrange(len(data) - 64), rng.randrange(300), len(data) - 64])
    model.write_bytes(data[:keep])
    return f"cut to {keep} bytes"


def gguf_tensor(model: Path, rng: random.Random) -> str:
    """Name, dimensions, type or offset of one tensor, overwritten with absurd values."""
    data = bytearray(model.read_bytes())
    name = rng.choice([b"blk.0.attn_q.weight", b"output_norm.weight", b"blk.1.ffn_down_exps.weight"])
    start = data.index(name)
    end = start + len(name)
    (dimensions,) = struct.unpack_from("<I", data, end)
    places = {
        "name length": (start - 8, "<Q", [0, 1, 1 << 40, 1 << 63]),
        "name": (start, "<B", [0xFF, 0x78]),
        "dimensions": (end, "<I", [0, 5, 1 << 31]),
        "first dimension": (end + 4, "<Q", [0, 1, 1 << 40, 1 << 63, (1 << 64) - 1]),
        "type": (end + 4 + 8 * dimensions, "<I", [4, 5, 10_000, 1 << 31]),
        "offset": (end + 8 + 8 * dimensions, "<Q", [1 << 40, 1 << 63, (1 << 64) - 32]),
    }
    what = rng.choice(list(places))
    at, layout, values = places[what]
    value = rng.choice(values)
    struct.pack_into(layout, data, at, value)
    model.write_bytes(data)
    return f"{what} of {name.decode()} is {value}"


GGUF: dict[str, Damage] = {d.__name__: d for d in (flip_gguf, cut_gguf, gguf_tensor)}


def load(model: Path) -> None:
    """Everything that `kt serve` does with the files before it serves."""
    from tandem import models
    from tandem.checkpoint import load_model_config, open_checkpoint
    from tandem.flags.engine_config import EngineConfig
    from tandem.kernels.reference import TorchOps
    from tandem.machine.machine import Machine
    from tandem.planner.resolve import resolve

    config = load_model_config(model)
    plan = resolve(EngineConfig(model=str(model), dtype="float32"), config, Machine.detect())
    models.build(config, plan, open_checkpoint(model), TorchOps())


def outcome(model: Path) -> tuple[str, str]:
    from tandem.errors import CheckpointError

    try:
        load(model)
    except CheckpointError as error:
        return "named" if names_the_file(model, str(error)) else "not named", str(error)
    except BaseException as error:
        return type(error).__name__, str(error)
    return "loaded", ""


def names_the_file(model: Path, message: str) -> bool:
    """The file; the directory where a tensor is in none of its files."""
    files = [file.name for file in model.iterdir()] if model.is_dir() else [model.name]
    missing = str(model) in message and (" has no tensor " in message or " has neither " in message)
    return missing or any(name in message for name in files) or ".safetensors is missing" in message


def limit_memory() -> None:
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + SPARE_BYTES, mapped + SPARE_BYTES))


def main(source: Path, scratch: Path, seeds: list[int]) -> None:
    import torch

    torch.set_num_threads(1)
    load(source)  # an undamaged one loads; and everything is imported before memory is limited
    limit_memory()
    damages = list((SAFETENSORS if source.is_dir() else GGUF).values())
    for seed in seeds:
        signal.alarm(SECONDS)
        rng, copy = random.Random(seed), scratch / f"copy-{seed}{source.suffix}"
        shutil.copytree(source, copy) if source.is_dir() else shutil.copy(source, copy)
        damage = damages[seed % len(damages)]
        said = f"{damage.__name__}: {damage(copy, rng)}"
        result, message = outcome(copy)
        print(
            json.dumps({"seed": seed, "damage": said, "outcome": result, "message": message[:300]}),
            flush=True,
        )
        shutil.rmtree(copy) if source.is_dir() else copy.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), [int(seed) for seed in sys.argv[3:]])
