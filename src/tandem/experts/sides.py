"""`Side`: the part of a layer's experts that one memory has, of which `HybridExperts` is put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from tandem.experts.feed import ExpertMatrices
from tandem.kernels.cpu import PackedExperts
from tandem.kernels.ops import ExpertBiases, SureRead

if TYPE_CHECKING:
    from tandem.kernels.gpu.experts import GpuExperts


class Side(Protocol):
    """Side of one layer. experts: those on it, ascending, when they are loaded; live placement may move them later."""

    experts: Sequence[int]

    @property
    def expert_bytes(self) -> int:
        """Packed, of one."""
        ...

    def set_biases(self, biases: ExpertBiases) -> None:
        """Takes the biases of all experts of the layer: one that comes from elsewhere finds its own."""
        ...

    def load_each(self, ids: Sequence[int], matrices: Sequence[ExpertMatrices]) -> None:
        """Packs some of its experts."""
        ...

    def take(self, whole: PackedExperts) -> None:
        """All of its experts, out of a layer that has those of every side."""
        ...

    def loaded(self) -> None:
        """Nothing is loaded after this."""
        ...

    def sure_read(self, experts: int) -> SureRead:
        """The last ones, which every step reads."""
        ...


class DeviceExperts:
    """Experts in slots on the GPU."""

    def __init__(self, layer: GpuExperts, experts: Sequence[int]) -> None:
        self._layer, self.experts = layer, experts

    @property
    def expert_bytes(self) -> int:
        return self._layer.bytes_per_expert

    def set_biases(self, biases: ExpertBiases) -> None:
        self._layer.set_biases(biases)

    def load_each(self, ids: Sequence[int], matrices: Sequence[ExpertMatrices]) -> None:
        self._layer.load_each(ids, matrices)

    def take(self, whole: PackedExperts) -> None:
        self._layer.take(self.experts, whole)

    def loaded(self) -> None:
        self._layer.all_loaded()

    def sure_read(self, experts: int) -> SureRead:
        return SureRead(self._layer, experts)


class HostExperts:
    """Experts in CPU memory. own_memory: they are not used in a file, for they may change places, or be streamed."""

    def __init__(self, layer: PackedExperts, experts: Sequence[int], own_memory: bool) -> None:
        self._layer, self.experts, self._own_memory = layer, experts, own_memory

    @property
    def expert_bytes(self) -> int:
        return self._layer.bytes_per_expert

    def set_biases(self, biases: ExpertBiases) -> None:
        self._layer.set_biases(biases)

    def load_each(self, ids: Sequence[int], matrices: Sequence[ExpertMatrices]) -> None:
        self._layer.load_each(ids, matrices)

    def take(self, whole: PackedExperts) -> None:
        """If that lies in a file, they stay there."""
        if whole.in_file and not self._own_memory:
            self._layer.share(whole)
        else:
            self._layer.load_from(whole, self.experts)

    def loaded(self) -> None:
        """Nothing is left to do."""

    def sure_read(self, experts: int) -> SureRead:
        return SureRead(self._layer, experts)
