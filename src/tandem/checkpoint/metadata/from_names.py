"""Formats of a checkpoint's matrices, from config.json and the index alone: before a weight is downloaded.

Headers say types and shapes; names do not. So formats are found by the tensors that lie beside a weight and by
`quantization_config`, and where both leave a choice, by the index's `total_size`. Once files are there, headers are
read instead (`survey.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from tandem.checkpoint.key_names import hugging_face_names
from tandem.checkpoint.parts import CODES, is_expert, part_of
from tandem.checkpoint.quant_hints import QuantHints, quant_hints
from tandem.checkpoint.survey import stored_formats
from tandem.formats.quant_format import QuantFormat
from tandem.spec.json_keys import read_json
from tandem.spec.model_config import ModelConfig, number_params
from tandem.spec.stored import StoredFormat, StoredFormats

INDEX = "model.safetensors.index.json"
PLAIN = {"float16": "f16", "float32": "f32"}  # of torch_dtype; all else is bf16
CLOSE = 0.04  # of the total size: what norms, biases and scales of unknown types may make
_NOT_QUANTISED = ("lm_head", "embed_tokens", ".gate", "shared_expert_gate", "norm")

Roles = frozenset[str]


class TensorIndex(NamedTuple):
    """Names of the tensors and their bytes, known without their files. total_bytes 0: not known."""

    names: tuple[str, ...]
    total_bytes: int


@dataclass(frozen=True, slots=True)
class IndexNames:
    """Names of tensors before their files are there. names: Hugging Face's. total_bytes 0: not known."""

    path: Path
    names: tuple[str, ...]
    total_bytes: int

    @classmethod
    def of(cls, directory: Path) -> IndexNames:
        """As an opened checkpoint would know them, whatever the index calls them."""
        names, total_bytes = read_index(directory)
        return cls(directory / INDEX, tuple(hugging_face_names(names)), total_bytes)

    def has_matrix(self, module: str) -> bool:
        """Whether the module has a matrix, however that is stored."""
        matrices = {(module, role) for role in CODES}
        return any(part_of(name) in matrices for name in self.names)

    def path_of(self, name: str) -> Path:
        return self.path


def read_index(directory: Path) -> TensorIndex:
    """Reads model.safetensors.index.json; empty where there is none. Raises CheckpointError when it cannot be read."""
    file = directory / INDEX
    if not file.is_file():
        return TensorIndex((), 0)
    content = read_json(file)
    weight_map, metadata = content.get("weight_map"), content.get("metadata")
    total = metadata.get("total_size", 0) if isinstance(metadata, dict) else 0
    names = tuple(weight_map) if isinstance(weight_map, dict) else ()
    return TensorIndex(names, int(total) if isinstance(total, int | float) else 0)


def formats_from_names(directory: Path, model: ModelConfig) -> StoredFormats:
    """Formats of a directory that has config.json and perhaps an index. Raises CheckpointError for a quantisation that
    cannot be read."""
    index = IndexNames.of(directory)
    if index.has_matrix("lm_head"):  # whatever config.json says of it
        model = replace(model, tied_embeddings=False)
    config, hints = read_json(directory / "config.json"), quant_hints(directory)
    candidates = list(_candidates(index.names, config, hints, model))
    chosen = candidates[0]
    if index.total_bytes:
        tables = sum(table.rows * table.width for table in model.tables)
        total = index.total_bytes - int(tables * _table_format(index.names).bytes_per_weight)
        chosen = min(candidates, key=lambda matrices: _distance(matrices, max(1, total)))
        if _distance(candidates[0], max(1, total)) < CLOSE:
            chosen = candidates[0]  # what the configuration says, if it can be
    return replace(stored_formats(chosen), tables=_table_format(index.names))


def _table_format(names: tuple[str, ...]) -> StoredFormat:
    """Format of tables that are read by row, which have one scale where they are codes."""
    coded = any(name.endswith(".ngram_embedding.weight_scale") for name in names)
    return StoredFormat(name="fp8", bytes_per_weight=1.0) if coded else StoredFormat()


Matrices = list[
    tuple[str, QuantFormat, int]
]  # a module that stands for its kind, its format, its number of weights


def file_bytes(matrices: Matrices) -> float:
    """Bytes of these matrices in the checkpoint's files."""
    return sum(fmt.file_bytes_per_weight * weights for _, fmt, weights in matrices)


def _distance(matrices: Matrices, total: int) -> float:
    return abs(file_bytes(matrices) / total - 1)


def _candidates(
    names: tuple[str, ...], config: Mapping[str, Any], hints: QuantHints, model: ModelConfig
) -> Iterator[Matrices]:
    """The most likely first."""
    kinds = _kinds(names) if names else _kinds_by_config(hints, config)
    plain = QuantFormat(PLAIN.get(str(config.get("torch_dtype") or config.get("dtype")), "bf16"))
    experts = _formats(kinds["experts"], hints, config, plain)
    if config.get("expert_dtype") == "fp4":
        experts.sort(key=lambda fmt: fmt.kind != "mxfp4")
    dense = _formats(kinds["dense"], hints, config, plain)
    shared = _formats(kinds["shared"], hints, config, plain)
    for i in range(max(len(dense), len(shared))):
        for expert in experts:
            yield _matrices(
                model, expert, shared[min(i, len(shared) - 1)], dense[min(i, len(dense) - 1)], plain
            )


def _matrices(
    model: ModelConfig, experts: QuantFormat, shared: QuantFormat, dense: QuantFormat, plain: QuantFormat
) -> Matrices:
    table = model.vocab * model.hidden
    head = 0 if model.tied_embeddings else table
    unrounded = head + model.hidden * model.moe.router.num_experts * len(model.moe_layers)
    tied = table - head
    layer, numbers = "model.layers.0.", number_params(model)
    others = model.dense_params - model.shared_params - unrounded - tied - numbers
    return [
        (f"{layer}mlp.experts.0.up_proj", experts, model.routed_params),
        (f"{layer}mlp.shared_experts.up_proj", shared, model.shared_params),
        (f"{layer}self_attn.o_proj", dense, others),
        (f"{layer}self_attn.kv_b_proj", dense, numbers),
        ("lm_head", plain, unrounded),
        ("model.embed_tokens", plain, table),
    ]


def _kinds(names: Iterable[str]) -> dict[str, Roles]:
    """Kind of matrix → the tensors that most matrices of the kind consist of. names: Hugging Face's."""
    modules: dict[str, set[str]] = {}
    for name in names:
        module, role = part_of(name)
        modules.setdefault(module, set()).add(f"{role}_inv" if name.endswith("_scale_inv") else role)
    counts = {kind: Counter[Roles]() for kind in ("experts", "shared", "dense")}
    for module, roles in modules.items():
        if roles.isdisjoint(CODES) or module.endswith(_NOT_QUANTISED) or module.endswith("bias"):
            continue
        kind = "shared" if "shared_expert" in module else "experts" if is_expert(module) else "dense"
        counts[kind][frozenset(roles)] += 1
    plain = frozenset(("weight",))
    return {kind: counter.most_common(1)[0][0] if counter else plain for kind, counter in counts.items()}


def _kinds_by_config(hints: QuantHints, config: Mapping[str, Any]) -> dict[str, Roles]:
    """Without names: all matrices are as the configuration says."""
    by_method = {
        "": ("weight",), "gptq": ("qweight", "scale"), "gptq_v2": ("qweight", "scale"), "awq": ("qweight", "scale"),
        "compressed-tensors": ("packed", "scale", "shape"), "mxfp4": ("blocks", "scale"),
        "modelopt": ("weight", "scale", "multiplier"), "modelopt_fp4": ("weight", "scale", "multiplier"),
    }  # fmt: skip
    scaled = "weight", "scale_inv" if hints.blocks else "scale"
    floats = hints.bits == 8 and "'float'" in str(config.get("quantization_config"))  # each is a byte, not packed
    roles = frozenset(scaled if floats else by_method.get(hints.method, scaled))
    if hints.method == "mxfp4":  # of experts alone
        return {"experts": roles, "shared": frozenset(("weight",)), "dense": frozenset(("weight",))}
    return dict.fromkeys(("experts", "shared", "dense"), roles)


def _formats(
    roles: Roles, hints: QuantHints, config: Mapping[str, Any], plain: QuantFormat
) -> list[QuantFormat]:
    """Formats that such a matrix may have, the most likely first."""
    group = hints.groups[0] if hints.groups else 128
    if "qweight" in roles:
        packing, ordered = (
            "awq" if hints.method == "awq" else "gptq",
            "order" in roles and hints.act_order is not False,
        )
        kind = f"int{hints.bits or 4}"
        return [QuantFormat(kind, packing, group, 1, "F16", not hints.symmetric, ordered)]
    if "packed" in roles:
        return _packed(roles, hints, group)
    if "blocks" in roles:
        return [QuantFormat("mxfp4", "mxfp4", 32, 1, "U8")]
    if "multiplier" in roles:
        return [QuantFormat("nvfp4", "modelopt", 16, 1, "F8_E4M3")]
    if roles.isdisjoint(("scale", "scale_inv")):
        return [plain]
    return _scaled(hints, config, "scale_inv" in roles)


def _packed(roles: Roles, hints: QuantHints, group: int) -> list[QuantFormat]:
    if "divisor" in roles:
        return [QuantFormat("nvfp4", "compressed-tensors", 16, 1, "F8_E4M3")]
    if "shape" not in roles:
        return [QuantFormat("mxfp4", "mxfp4", 32, 1, "U8")]
    groups = group if hints.groups else 0
    return [QuantFormat(f"int{hints.bits or 4}", "compressed-tensors", groups, 1, "BF16", "zeros" in roles)]


def _scaled(hints: QuantHints, config: Mapping[str, Any], inverse: bool) -> list[QuantFormat]:
    """One byte or half a byte a weight: which, only the total size says for sure."""
    rows, columns = hints.blocks[0] if hints.blocks else (128, 128) if inverse else (1, 0)
    fp8 = QuantFormat("fp8", "fp8", columns, rows, "F32")
    mxfp4 = QuantFormat("mxfp4", "mxfp4", 32, 1, "F8_E8M0")
    if "MXFP8" in str(config.get("quantization_config")).upper():
        return [QuantFormat("mxfp8", "fp8", 32, 1, "U8")]
    if hints.method == "w4afp8":
        return [QuantFormat("int4", "w4afp8", hints.groups[0] if hints.groups else 128, 1, "BF16"), fp8]
    if hints.method == "compressed-tensors" and "'int'" in str(config.get("quantization_config")):
        return [QuantFormat("int8", "compressed-tensors", 0, 1, "BF16"), fp8]
    return [fp8, mxfp4]
