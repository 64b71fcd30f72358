"""From the checkpoint into a skeleton, tensor by tensor: packed matrices where they are plain, else PyTorch's."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tandem.architectures.foreign.observe import linears
from tandem.architectures.foreign.skeleton import expert_modules, layer_of
from tandem.errors import CheckpointError
from tandem.experts import ExpertMatrices
from tandem.models.builder import Builder
from tandem.models.foreign.experts import ExpertReader, ForeignExperts
from tandem.models.foreign.modules import MappedEmbedding, Matrix, replace_module
from tandem.models.foreign.names import module_of
from tandem.models.foreign.stored import StoredTensors, put


class WeightLoader:
    """Fills a skeleton. experts: by the id of their module, once `load` is done."""

    def __init__(self, b: Builder, model: Any, ran: set[str]) -> None:
        """ran: the modules that a pass calls; towers without any get no weights."""
        self._b, self._model, self._ran = b, model, ran
        self._stored = StoredTensors(model, b.checkpoint)
        self._modules, self._matrices = expert_modules(model), linears(model)
        self._idle = _idle_parts(model, ran)
        self.experts: dict[int, ForeignExperts] = {}

    def load(self) -> None:
        """Layer by layer, so that the file's pages can be let go of. Raises CheckpointError naming what is missing."""
        by_layer: dict[int, list[str]] = defaultdict(list)
        for name in self._own_tensors():
            by_layer[layer_of(name)].append(name)
        for index in range(len(self._b.config.layers)):
            self._load(by_layer.pop(index, []))
            self._load_experts(index)
            self._b.layer_done(index)
        for rest in by_layer.values():
            self._load(rest)
        self._fill_buffers()
        self._b.all_done()

    def _own_tensors(self) -> list[str]:
        """Names of tensors that are neither the experts' nor of a part that text does not need."""
        inside = tuple(f"{name}." for name in self._modules)
        norms = tuple(f"{name}.post_expert_norm." for name in self._modules)
        names = [
            name for name in self._stored.targets if name.startswith(norms) or not name.startswith(inside)
        ]
        return [name for name in names if not name.startswith(self._idle)]

    def _load(self, names: Iterable[str]) -> None:
        for name in names:
            module, _, part = name.rpartition(".")
            if self._packs(module) and part in ("weight", "bias"):
                if part == "weight":
                    replace_module(self._model, module, self._matrix(module))
            elif part == "weight" and self._is_table(module):
                replace_module(self._model, module, self._table(module))
            else:
                self._tensor(name)

    def _packs(self, module: str) -> bool:
        """A matrix that is called, and stored under one name."""
        plain = module in self._matrices and self._stored.plain(f"{module}.weight") is not None
        return plain and module in self._ran

    def _matrix(self, module: str) -> Matrix:
        own, target, stored = self._matrices[module], f"{module}.weight", self._stored
        name = module_of(stored.plain(target) or "")
        joint_bias = own.bias is not None and stored.plain(f"{module}.bias") == f"{name}.bias"
        narrow, read = stored.dtype(target) == self._b.dtype, partial(self._read_again, module)
        if narrow:
            packed = self._b.linear([name], [own.out_features], own.in_features, bias=joint_bias)
        else:
            packed = self._b.float_linear(name, own.out_features, own.in_features)
        separate_bias = own.bias is not None and not (joint_bias and narrow)
        return Matrix(packed, read, self._resident(f"{module}.bias") if separate_bias else None)

    def _read_again(self, module: str, part: str) -> Tensor | None:
        """The numbers of a packed matrix, or its bias."""
        name = f"{module}.{part}"
        return self._resident(name) if self._stored.source(name) is not None else None

    def _resident(self, name: str) -> Tensor:
        return self._b.ops.resident(self._stored.tensors_of(name)[name])

    def _is_table(self, module: str) -> bool:
        plain = type(self._model.get_submodule(module)) is nn.Embedding
        return plain and self._stored.plain(f"{module}.weight") is not None

    def _table(self, module: str) -> MappedEmbedding:
        own: nn.Embedding = self._model.get_submodule(module)
        name = self._stored.plain(f"{module}.weight") or ""
        return MappedEmbedding(self._b.lookup(name, own.num_embeddings, own.embedding_dim), self._b.dtype)

    def _tensor(self, name: str) -> None:
        owner, _, last = name.rpartition(".")
        if not getattr(self._model.get_submodule(owner), last).is_meta:  # another one's converter made it
            return
        if self._stored.source(name) is None and self._stored.may_lack(name):
            return
        for target, tensor in self._stored.tensors_of(name).items():
            put(self._model, target, self._b.ops.resident(tensor))

    def _load_experts(self, layer: int) -> None:
        names = {layer_of(name): name for name in self._modules}
        if layer not in names:
            return
        shape = self._b.config.layers[layer].moe
        assert shape is not None

        def matrices_of(index: int) -> Callable[[int], ExpertMatrices]:
            name = names[index]
            return ExpertReader(self._model, name, self._modules[name], self._stored)

        experts = self._b.experts(layer, shape.experts, matrices_of)
        module = self._modules[names[layer]]
        norm = module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None
        self.experts[id(module)] = ForeignExperts(experts, self._b.tally(layer), norm)
        for name in list(module._parameters):  # experts are ours: their tensors are never made
            module._parameters[name] = None

    def _fill_buffers(self) -> None:
        """Computes buffers that no file holds (rotations, for example), by Transformers' own code."""
        model = self._model
        buffers = {n: x for n, x in model.named_buffers() if x.is_meta and not n.startswith(self._idle)}
        for name, buffer in buffers.items():
            _blank(model, name, buffer)
        owners = {name.rpartition(".")[0] for name in buffers}
        for name, module in model.named_modules():
            module._is_hf_initialized = name not in owners
        model.initialize_weights()
        for name in buffers:
            self._check_filled(name)
        missing = [n for n, x in model.named_parameters() if x.is_meta and not n.startswith(self._idle)]
        if missing:
            raise self._stored.missing(missing[0])

    def _check_filled(self, name: str) -> None:
        buffer = self._model.get_buffer(name)
        if buffer.is_floating_point() and bool(buffer.isnan().any()):
            raise CheckpointError(
                f"{self._b.checkpoint.path}: {name} is in no file, and Transformers does not compute it either"
            )
        owner, _, last = name.rpartition(".")
        self._model.get_submodule(owner)._buffers[last] = self._b.ops.resident(buffer)


def _blank(model: Any, name: str, buffer: Tensor) -> None:
    """Memory whose numbers show when nobody sets them."""
    owner, _, last = name.rpartition(".")
    value = math.nan if buffer.is_floating_point() else 0
    model.get_submodule(owner)._buffers[last] = torch.full(buffer.shape, value, dtype=buffer.dtype)


def _idle_parts(model: Any, ran: set[str]) -> tuple[str, ...]:
    """Prefixes of towers that text does not pass through: children of the model, or of its base, none of which ran."""
    base = model.base_model_prefix
    tops = [n for n, _ in model.named_modules() if n and (n.count(".") == 0 or n.rpartition(".")[0] == base)]
    return tuple(f"{top}." for top in tops if not any(n == top or n.startswith(f"{top}.") for n in ran))
