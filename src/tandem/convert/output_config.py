"""Files beside the weights: the index, config.json with compressed-tensors' quantization_config, small files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tandem.checkpoint.demo import MANIFEST
from tandem.checkpoint.mapped.shards import INDEX
from tandem.convert.layout import Layout
from tandem.convert.methods import Method
from tandem.convert.record import RECORD
from tandem.convert.source import Module, SourceWeights
from tandem.spec.json_keys import read_json
from tandem.spec.small_files import write_whole

CONFIG = "config.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
_WRITTEN = (
    CONFIG,
    INDEX,
    RECORD,
    MANIFEST,
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
)
_LARGEST_COPIED = 256 << 20


def copy_small_files(model: Path, out: Path) -> None:
    """Tokenizer, chat template, generation settings, licence: every file that holds no weights."""
    for file in sorted(model.iterdir()):
        small = file.is_file() and file.stat().st_size <= _LARGEST_COPIED
        if (
            small
            and file.suffix not in _WEIGHTS
            and file.name not in _WRITTEN
            and not file.name.startswith(".")
        ):
            write_whole(out / file.name, file.read_bytes())


def write_index(layout: Layout, out: Path) -> None:
    """Which file holds which tensor."""
    total = sum(item.written_bytes for shard in layout.shards for item in shard.items)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(layout.weight_map.items()))}
    write_whole(out / INDEX, _json(index))


def write_config(source: SourceWeights, method: Method, layout: Layout, out: Path) -> None:
    """The source's config.json with another quantization_config."""
    config = read_json(source.checkpoint.path / CONFIG)
    for key in ("quantization_config", "compression_config"):
        config.pop(key, None)
    config["quantization_config"] = quantization_config(source, method, layout)
    write_whole(out / CONFIG, _json(config))


def quantization_config(source: SourceWeights, method: Method, layout: Layout) -> dict[str, Any]:
    """As compressed-tensors' own package writes it: one group for what was converted, one for fp8 that was kept."""
    done = {module.name for module in layout.converted}
    unconverted = [
        module for module in source.modules.values() if module.name not in done and "embed" not in module.name
    ]
    fp8 = source.fp8_schemes(module for module in unconverted if module.input_type == "fp8")
    plain = [module for module in unconverted if module.input_type != "fp8"]
    everything = [*unconverted, *layout.converted]
    targets = patterns(layout.converted, everything) if fp8 else ["Linear"]
    groups = [_group(method.format, targets, method.scheme, method.activations)]
    for scheme, modules in fp8:
        groups.append(
            _group("float-quantized", patterns(modules, everything), scheme, _fp8_activations(scheme))
        )
    formats = {group["format"] for group in groups}
    return {
        "quant_method": "compressed-tensors",
        "format": method.format if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": patterns(plain, everything),
        "kv_cache_scheme": None,
    }


def patterns(modules: Iterable[Module], everything: Iterable[Module]) -> list[str]:
    """Names as compressed-tensors matches them: a regular expression for those that differ in numbers only, unless it
    would match one that is not meant."""
    meant = {module.name for module in modules}
    spoilt = {_numberless(module.name) for module in everything if module.name not in meant}
    return sorted({name if _numberless(name) in spoilt else _numberless(name) for name in meant})


def _numberless(name: str) -> str:
    pattern = re.sub(r"\d+", r"\\d+", re.escape(name))
    return f"re:{pattern}$" if re.search(r"\.\d+\.", name) else name


def _fp8_activations(scheme: dict[str, Any]) -> dict[str, Any]:
    """Activations that fp8 checkpoints are served with elsewhere; Tandem keeps activations in bf16."""
    plain = {key: value for key, value in scheme.items() if key != "block_structure"} | {"dynamic": True}
    if "block_structure" in scheme:
        return plain | {"strategy": "group", "group_size": scheme["block_structure"][1]}
    return plain | {"strategy": "token"}


def _group(storage: str, targets: list[str], weights: Any, activations: Any) -> dict[str, Any]:
    return {
        "format": storage,
        "targets": targets,
        "weights": dict(weights),
        "input_activations": None if activations is None else dict(activations),
        "output_activations": None,
    }


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
