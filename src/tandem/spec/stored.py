"""`StoredFormats`: what the checkpoint's matrices are stored as, in the planner's words. `checkpoint/` fills it in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """Stored format of one kind of matrix. Several formats are named together and weighed by their numbers."""

    name: str = "bf16"  # as people read it: "int4 g32", "fp8 128x128 + bf16"
    quantised: bool = False
    bytes_per_weight: float = 2.0  # once packed as it is
    methods: tuple[str, ...] = ("BF16",)  # values of --kt-method that mean it
    group: int = 0  # along K; 0: none, or several
    along: int = 1  # weights along K that stay together where the matrix is cut
    outputs: tuple[tuple[str, int], ...] = ()  # the same by the last part of a module's name, where it is more than 1
    decoded: str = ""  # what of it has no packed form and becomes numbers: "q5_k"
    gpu_bytes_per_weight: float = (
        2.0  # of dense matrices in GPU memory, where what the kernels do not read is bfloat16
    )
    zero_points: bool = False  # of some of it, as packed
    shares: tuple[tuple[str, float], ...] = ()  # of its weights, by format, the most frequent first
    layers: tuple[float, ...] = ()  # `bytes_per_weight` of each layer's experts, in order, where they differ
    unread_by_gpu: str = ""  # what of it the GPU kernels do not read: "q4_k, q6_k"

    def cut_bytes(self, width: int) -> float:
        """Per weight of a matrix that is cut to `width` columns, what scales take beyond `bytes_per_weight`: a group
        that the cut goes through becomes several (formats/cut.py)."""
        if not self.group or width % self.group == 0 or width % self.along:
            return 0.0
        scales = self.bytes_per_weight - int(2 * self.bytes_per_weight) / 2  # codes take whole halves of a byte
        return scales * (self.group / self.along - 1)

    def unit(self, output: str) -> int:
        """Weights along K that stay together in modules whose names end so."""
        return dict(self.outputs).get(output, 1)


@dataclass(frozen=True, slots=True)
class StoredFormats:
    """Routed experts, shared experts, the embedding, and all other matrices."""

    experts: StoredFormat = StoredFormat()
    shared: StoredFormat = StoredFormat()
    dense: StoredFormat = StoredFormat()
    embedding: StoredFormat = StoredFormat()
    tables: StoredFormat = StoredFormat()  # that are read by row
    in_memory: bool = False  # the experts' files are in a file system without a disk
    aligned: bool = True  # experts of bfloat16 can be read where they lie in them

    @property
    def dense_codes(self) -> bool:
        """Whether there are codes among the matrices that every token uses."""
        return self.dense.quantised or self.shared.quantised


UNQUANTISED = StoredFormats()


@dataclass(frozen=True, slots=True)
class RowTable:
    """A third kind of weight: rows that are read one by one, by numbers that token ids alone decide. It is neither
    packed nor rounded, and no GPU has a copy. reads: rows that a token reads."""

    rows: int
    width: int
    reads: int = 1
