"""`Plan`: the outcome of `resolve(config, model, machine)`. What `kt serve --plan-only` prints."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.planner.choices.decision import Decision
from tandem.planner.choices.speculation import DRAFT_ALGORITHMS, SpeculationPlan
from tandem.planner.forecast.ledger import Ledger
from tandem.planner.gpu_plan import GpuPlan


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything the engine needs to know that the user may or may not have said. Immutable."""

    dtype: str  # "bfloat16" | "float32": activations, KV cache and dense weights
    expert_format: str  # of packed routed experts: "bf16" | "f32" | "int8" | "int4" | "stored": as they are
    tier: str  # kernel tier: "scalar" | "avx2" | "avx512" | "avx512_bf16" | "amx"
    cpus: tuple[int, ...]  # logical CPU of each pool thread, -1: not pinned; its length is the thread count
    context_length: int  # longest prompt + answer of one request, tokens
    page_size: int  # tokens per KV page
    num_pages: int  # KV pages of the whole cache
    max_running_requests: int  # sequences decoded together
    max_step_tokens: int  # token budget of one step: decode tokens + prefill chunks
    radix_cache: bool  # share KV pages of equal prefixes
    fuse_shared_experts: bool  # compute shared experts as extra always-chosen routed experts
    dense_codes: bool = False  # dense matrices stored as codes are computed from them, not from numbers
    parts: tuple[int, ...] = ()  # which part of the weights each pool thread reads; (): they are not divided
    part_nodes: tuple[int, ...] = ()  # the NUMA node whose memory each part is in; (): any
    decisions: tuple[Decision, ...] = field(default=())
    notices: tuple[str, ...] = field(default=())  # flags and keys that change nothing; start-up prints them
    num_window_pages: int = 0  # of layers that see a window; 0: they keep all tokens, as the others
    num_slots: int = 0  # for what models keep of a sequence beside pages; 0: this one keeps nothing
    gpu: GpuPlan | None = None  # None: everything runs on the CPU
    int8_activations: bool = False  # of CPU experts: rounded before each product
    experts_in_place: bool = False  # those in CPU memory are used in the checkpoint's own pages, not packed
    deterministic: bool = False  # a row has the same bits in every batch
    speculation: SpeculationPlan | None = None  # None: each step decodes one token per sequence
    tables: str = "map"  # where tables that are read by row are: "ram" | "map" | "disk"
    ledgers: tuple[Ledger, ...] = field(default=())  # what it takes of each memory
    ranks: int = 1  # that share the model; everything here is of each
    idle: str = ""  # of a machine with GPUs that are not used: which, and why; "": one is used, or there is none

    image_tokens: int = 0  # of an image, at most; 0: none is read
    image_pixel_bytes: int = 0  # of resized images of requests that the server keeps, at most
    blind: str = ""  # why no image is read; "": they are

    @property
    def draft_tokens(self) -> int:
        """Draft tokens of a sequence in a step, at most."""
        return 0 if self.speculation is None else self.speculation.most_draft_tokens

    @property
    def drafts(self) -> bool:
        """Whether a draft layer drafts."""
        return self.speculation is not None and self.speculation.algorithm in DRAFT_ALGORITHMS
