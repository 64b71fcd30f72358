"""`StoredTensors`: what the checkpoint has for a module's tensors, converted as Transformers would, in their dtypes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tandem.checkpoint import Checkpoint
from tandem.errors import CheckpointError
from tandem.formats.cut import numbers
from tandem.models.foreign.names import TensorRecipe, module_of, sources


class StoredTensors:
    """Tensors of a skeleton, by their names in it."""

    def __init__(self, model: Any, checkpoint: Checkpoint) -> None:
        self._model, self.checkpoint = model, checkpoint
        self.targets: dict[str, Tensor] = model.state_dict()
        self.recipes, self.unused = sources(model, checkpoint.names())
        self._tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
        self._wide = _patterns(getattr(model, "_keep_in_fp32_modules_strict", None))
        self._absent = _patterns(getattr(model, "_keys_to_ignore_on_load_missing", None))

    def source(self, name: str) -> TensorRecipe | None:
        """Source of the tensor, or of the one that it is tied to; None where no file has it."""
        return self.recipes.get(name if name in self.recipes else self._tied.get(name, name))

    def plain(self, name: str) -> str | None:
        """Name of the tensor in the checkpoint; None where it is not stored as it is."""
        source = self.source(name)
        return None if source is None or source.converter is not None else source.name

    def may_lack(self, name: str) -> bool:
        """Whether Transformers makes it where no file has it."""
        return any(pattern.search(name) for pattern in self._absent)

    def dtype(self, name: str) -> torch.dtype:
        """Some tensors stay float32 whatever the others are."""
        wide = any(pattern.search(name) for pattern in self._wide)
        return torch.float32 if wide else self.targets[name].dtype

    def tensors_of(self, name: str) -> dict[str, Tensor]:
        """The tensor `name`, and those that come with it, copied in their dtypes. Raises CheckpointError."""
        source = self.source(name)
        if source is None:
            raise self.missing(name)
        if source.converter is None:
            by_name = {name: self.numbers(source.name)}
        else:
            tensors = {p: [self.numbers(each) for each in names] for p, names in source.stored_names.items()}
            target = next(t for t, s in self.recipes.items() if s is source)
            by_name = source.converted(target, self._model, tensors)
        return {each: self._checked(each, tensor) for each, tensor in by_name.items()}

    def numbers(self, name: str) -> Tensor:
        """Numbers of a tensor by its name in the checkpoint, decoded where it is stored as codes."""
        if name in self.checkpoint:
            return self.checkpoint.get(name)
        shape = self.targets[name].shape if name in self.targets else ()
        if len(shape) != 2:
            raise CheckpointError(
                f"{self.checkpoint.path}: {name} is stored as codes and cannot be converted"
            )
        return numbers(self.checkpoint.weight(module_of(name), (shape[0], shape[1])))

    def _checked(self, name: str, tensor: Tensor) -> Tensor:
        shape = self.targets[name].shape
        if tensor.shape != shape:
            raise CheckpointError(
                f"{self.checkpoint.path}: what makes {name} has shape {tuple(tensor.shape)}, but config.json implies "
                f"{tuple(shape)}"
            )
        return tensor.to(self.dtype(name), copy=True).contiguous()

    def missing(self, name: str) -> CheckpointError:
        return CheckpointError(f"{self.checkpoint.path} has nothing that makes {name}")


def _patterns(words: Iterable[str] | None) -> list[re.Pattern[str]]:
    return [re.compile(word.replace("*", ".*")) for word in words or ()]


def put(model: Any, name: str, tensor: Tensor) -> None:
    """Sets a parameter or buffer of a skeleton."""
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    if last in module._parameters:
        module._parameters[last] = nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[last] = tensor
    getattr(module, last)._is_hf_initialized = True
