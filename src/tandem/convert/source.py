"""`SourceWeights`: a checkpoint as a list of what can be converted and what is only copied."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem.architectures.names import ExpertNames
from tandem.checkpoint.checkpoint import SafetensorsCheckpoint
from tandem.checkpoint.parts import Parts, codes_part, is_table
from tandem.convert.methods import StoredPart
from tandem.errors import CheckpointError, ConfigError
from tandem.formats.codes import Weight, WeightCodes
from tandem.formats.cut import rows_of
from tandem.formats.quant_format import QuantFormat
from tandem.formats.reference import decoded

_ROUTED = re.compile(r"(^|\.)experts\.\d+\.[^.]+$")
_FUSED = re.compile(r"(^|\.)experts\.(gate_up_proj|down_proj)$")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_NOT_LINEAR = re.compile(
    r"(embed|norm|conv)[^.]*$|(^|\.)(lm_head|head|gate|router|shared_expert_gate|weights_proj)$"
)
_INPUT_NAMES = {"f16": "fp16", "f32": "fp32", "mxfp8": "fp8", "mxfp4": "fp4", "nvfp4": "fp4"}
OTHER_INPUT_NAMES = {"awq": "int4", "gptq": "int4", "mxfp4": "fp4", "float16": "fp16", "bfloat16": "bf16"}
INPUT_TYPES = ("auto", "bf16", "fp16", "fp8", "fp4", "int4")


@dataclass(frozen=True, slots=True)
class Module:
    """A matrix [N, K], and the tensors it is stored in (all of them, where it is one expert of a fused tensor)."""

    name: str
    shape: tuple[int, int]
    format: QuantFormat
    tensors: tuple[str, ...]
    fused: FusedPlace | None = None

    @property
    def routed(self) -> bool:
        """Whether it is one of a routed expert's matrices."""
        return _ROUTED.search(self.name) is not None

    @property
    def linear(self) -> bool:
        """Whether it multiplies activations; not so: embeddings, heads, norms, convolutions and routers."""
        return _NOT_LINEAR.search(self.name) is None

    @property
    def input_type(self) -> str:
        """As --input-type calls it."""
        return _INPUT_NAMES.get(self.format.kind, self.format.kind)


@dataclass(frozen=True, slots=True)
class FusedPlace:
    """Rows of one expert in a tensor [E, N, K], or transposed [E, K, N], that holds all experts of a layer."""

    module: str
    expert: int
    shape: tuple[int, int, int]
    rows: slice
    transposed: bool = False


def layer_of(name: str) -> int:
    """The decoder layer a tensor belongs to; -1 for none."""
    match = _LAYER.search(name)
    return int(match.group(1)) if match else -1


class SourceWeights:
    """Reads headers only; `weight` maps weights, `rows` reads them."""

    def __init__(self, checkpoint: SafetensorsCheckpoint, experts: ExpertNames | None = None) -> None:
        """experts: how the family stores them in one tensor; None: in the usual way."""
        self.checkpoint, self._experts = checkpoint, experts or ExpertNames()
        self._names = {(p.file, p.name): name for name in checkpoint.names() for p in [checkpoint.part(name)]}
        modules = (
            module for name, parts in checkpoint.modules().items() for module in self._modules(name, parts)
        )
        self.modules = {module.name: module for module in modules}

    def tensors(self) -> Iterator[tuple[str, StoredPart]]:
        """Every tensor's Hugging Face name, type and shape."""
        for name in self._names.values():
            part = self.checkpoint.part(name)
            yield name, StoredPart(part.dtype, part.shape)

    def stored_bytes(self, source: Module | str) -> int:
        """Bytes of the source that a module or tensor takes."""
        if isinstance(source, str):
            begin, end = self.checkpoint.byte_range(source)
            return end - begin
        whole = sum(self.stored_bytes(name) for name in source.tensors)
        if source.fused is None:
            return whole
        n, k = source.shape
        return whole * n * k // torch.Size(source.fused.shape).numel()

    def weight(self, module: Module) -> Weight:
        """The matrix, mapped; its bytes are asked for."""
        fused = module.fused
        if fused is not None and fused.transposed:
            whole = self.checkpoint.expert_weight(fused.module, fused.expert, fused.shape)
            assert not isinstance(whole, WeightCodes)
            return whole.T[fused.rows].contiguous()
        if fused is not None:
            return self.checkpoint.expert_weight(fused.module, fused.expert, fused.shape, fused.rows)
        self.checkpoint.read_ahead_tensors(module.tensors)
        return self.checkpoint.weight(module.name, module.shape)

    def forget(self, module: Module) -> None:
        """Gives its pages back."""
        self.checkpoint.forget_tensors(module.tensors)

    def rows(self, module: Module, weight: Weight, rows: slice) -> Tensor:
        """float32 [n, K]. CheckpointError for a weight that is no number."""
        part = rows_of(weight, rows)
        numbers = decoded(part) if isinstance(part, WeightCodes) else part.float()
        if not torch.isfinite(numbers).all():
            file = self.checkpoint.part(module.tensors[0]).file
            raise CheckpointError(
                f"{file}: {module.name} holds weights that are not finite: copy the file again"
            )
        return numbers

    def check_input(self, converted: Iterable[Module], input_type: str, method: str) -> None:
        """Raises ConfigError when the weights are not stored as --input-type says, or already as `method` has them."""
        input_type = OTHER_INPUT_NAMES.get(input_type, input_type)
        if input_type not in INPUT_TYPES:
            raise ConfigError(f"--input-type {input_type!r} does not exist; these do: {', '.join(INPUT_TYPES)}")
        for module in converted:
            stored = module.input_type
            if input_type not in ("auto", stored):
                say = f"say {stored}, or auto" if stored in INPUT_TYPES else "say auto"
                raise ConfigError(f"{module.name} is stored as {stored}, not as --input-type {input_type}: {say}")
            if stored == {"MXFP4": "fp4"}.get(method, method.lower()):
                raise ConfigError(
                    f"{module.name} is stored as {module.format} already: rounding it to {method} again could "
                    f"only lose. Serve it as it is, or take another --method"
                )

    def fp8_schemes(self, modules: Iterable[Module]) -> list[tuple[dict[str, Any], list[Module]]]:
        """compressed-tensors' scheme of fp8 weights → those that have it."""
        schemes: dict[str, tuple[dict[str, Any], list[Module]]] = {}
        for module in modules:
            scheme = _fp8_scheme(module.format)
            schemes.setdefault(str(scheme), (scheme, []))[1].append(module)
        return list(schemes.values())

    def _modules(self, name: str, parts: Parts) -> Iterator[Module]:
        """One for a matrix, one per expert and matrix for a fused tensor, none for anything else."""
        own = tuple(self._names[part.file, part.name] for part in parts.values())
        codes = codes_part(parts)
        if codes is None or is_table(codes.name):  # a table is read by row, as it is stored
            return
        if len(codes.shape) == 3 and _FUSED.search(name):
            yield from self._fused(name, parts, own)
        elif len(codes.shape) == 2 and codes.name.endswith((".weight", ".weight_packed", ".qweight")):
            yield Module(name, self.checkpoint.shape(name), self.checkpoint.format(name), own)

    def _fused(self, name: str, parts: Parts, own: tuple[str, ...]) -> Iterator[Module]:
        """Transformers' form: gate_up [E, 2 width, hidden], gate rows first; down [E, hidden, width]. Or as the family
        has it: transposed, gate and up in turn."""
        if set(parts) != {"weight"}:
            raise ConfigError(
                f"{name} holds experts in a fused quantised form, which is not converted: serve it as it is"
            )
        turned = self._experts.transposed
        experts, *sizes = stored = parts["weight"].shape
        n, k = reversed(sizes) if turned else sizes
        layer, _, matrix = name.rpartition(".")
        halves = {matrix: slice(0, n)}
        if matrix == "gate_up_proj" and self._experts.interleaved:
            halves = {"gate_proj": slice(0, n, 2), "up_proj": slice(1, n, 2)}
        elif matrix == "gate_up_proj":
            halves = {"gate_proj": slice(0, n // 2), "up_proj": slice(n // 2, n)}
        for expert in range(experts):
            for each, rows in halves.items():
                place = FusedPlace(name, expert, (stored[0], stored[1], stored[2]), rows, turned)
                shape = (len(range(n)[rows]), k)
                yield Module(f"{layer}.{expert}.{each}", shape, self.checkpoint.format(name), own, place)


def _fp8_scheme(fmt: QuantFormat) -> dict[str, Any]:
    scheme: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    if fmt.group:
        return scheme | {"strategy": "block", "block_structure": [fmt.block_rows, fmt.group]}
    return scheme | {"strategy": "tensor" if fmt.block_rows == 0 else "channel"}
