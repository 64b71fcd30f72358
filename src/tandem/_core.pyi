"""Tandem's C++ core."""

from collections.abc import Sequence
from typing import Annotated, overload

SCRATCH_BYTES_PER_WORKER: int = 4358144

MAX_RANGES_AHEAD: int = 4

class ByteRange:
    """Packed weights somewhere in memory."""

    @property
    def bytes(self) -> int: ...

class WorkerPool:
    """
    One pinned worker per entry of cpus (-1: not pinned); the caller is worker 0.
    """

    def __init__(
        self,
        cpus: Sequence[int],
        spin_us: int = 200,
        nodes: Sequence[int] = [],
        memory_nodes: Sequence[int] = [],
    ) -> None:
        """
        nodes: of each worker, from 0. memory_nodes: where each node's memory is; empty: anywhere.
        """

    def __len__(self) -> int: ...
    @property
    def nodes(self) -> int:
        """How many memory nodes its workers belong to."""

    def start_latency(self, repeats: int) -> float:
        """Seconds an empty parallel region takes, mean over repeats."""

class ReadableFile:
    """
    While it lives, packing reads what is mapped at `address` from the open file `fd`.
    """

    def __init__(self, fd: int, address: int, bytes: int) -> None: ...

def buffer_bytes() -> int:
    """Of all packed weights and scratch, touched or not."""

def heap_bytes() -> int:
    """What malloc has given out; 0 where nobody knows."""

def return_free_memory() -> None:
    """What malloc has kept of freed memory goes back to the system."""

def cpu_tiers() -> list[str]:
    """Kernel tiers this CPU runs, built or not, slowest first."""

def built_tiers() -> list[str]:
    """
    Kernel tiers in this extension, slowest first; amx_standin is for tests.
    """

def supported_tiers() -> list[str]:
    """Kernel tiers that were built and that this CPU runs, slowest first."""

def cpu_model() -> str:
    """The CPU's own name for itself."""

class WeightFormat:
    """How a matrix is packed: what a code is, weights per scale, scale type."""

    def __init__(self, format: str, group: int, scales: str) -> None:
        """
        scales: their type, with +offsets or +zeros behind it where something is added.
        """

    def __eq__(self, arg: object, /) -> bool: ...
    def __str__(self) -> str: ...

class Codes:
    """A quantised matrix: codes and scales in arrays that this keeps alive."""

    def __init__(
        self,
        codes: object,
        scales: object,
        offsets: object | None,
        format: str,
        group: int,
        scale_type: str,
        block_rows: int = 1,
        halves: object | None = None,
        offset_halves: object | None = None,
        zeros: object | None = None,
        factors: object | None = None,
    ) -> None:
        """codes: bytes [rows, depth], or for 4 bits [rows, ceil(depth / 2)]."""

    @property
    def format(self) -> WeightFormat: ...

class BatchView:
    """A checked copy of a step's index arrays."""

    def __init__(
        self,
        positions: object,
        cache_slots: object,
        query_starts: object,
        seq_lens: object,
        block_tables: object,
        page_size: int,
        num_pages: int,
        slots: object | None = None,
        state_lens: object | None = None,
        num_verified: object | None = None,
    ) -> None: ...
    def become(self, other: BatchView) -> None:
        """Takes over the indices of another batch of as many rows."""

class Heads:
    """
    Head counts; a norm size of 0: no q or k norm; value_dim 0: as wide as keys.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        q_norm_size: int = 0,
        k_norm_size: int = 0,
        value_dim: int = 0,
    ) -> None: ...

class DeltaShape:
    """Sizes of a gated delta net, and where its projections lie in a row."""

    def __init__(
        self,
        k_heads: int,
        v_heads: int,
        k_dim: int,
        v_dim: int,
        conv_width: int,
        columns: Sequence[tuple[int, int]],
        projected: int,
        gates: int,
        sigmoid: bool = False,
    ) -> None:
        """
        columns: (first, step from key head to key head) of q, k, v, z, beta, decay.
        """

class Route:
    """How logits become experts and weights."""

    def __init__(
        self,
        experts: int,
        top_k: int,
        groups: int,
        top_groups: int,
        shared: int,
        sigmoid: bool,
        normalize: bool,
        group_by_top2: bool,
        scale: float,
        epsilon: float,
    ) -> None: ...
    @property
    def least_sum(self) -> float:
        """What chosen weights are divided by is at least this."""

    @least_sum.setter
    def least_sum(self, arg: float, /) -> None: ...

class DenseOps:
    """Norm, rotation, attention and routing on a pool."""

    def __init__(self, pool: WorkerPool, tier: str) -> None: ...
    def rms_norm(
        self, x: object, residual: object | None, weight: object, out: object, eps: float
    ) -> None: ...
    def rope_store(
        self,
        batch: BatchView,
        heads: Heads,
        qkv: object,
        cos: object,
        sin: object,
        q_norm: object | None,
        k_norm: object | None,
        k_pages: object,
        v_pages: object | None,
        q: object,
        eps: float,
    ) -> None:
        """v_pages None: keys are values, too."""

    def attention(
        self,
        batch: BatchView,
        heads: Heads,
        q: object,
        k_pages: object,
        v_pages: object | None,
        out: object,
        scale: float,
        window: int,
        sinks: object | None = None,
    ) -> None: ...
    def route(
        self,
        rule: Route,
        logits: object,
        bias: object | None,
        ids: object,
        weights: object,
        tokens: object | None = None,
        seen: object | None = None,
        chosen: object | None = None,
    ) -> None: ...
    def delta_rule(
        self,
        batch: BatchView,
        shape: DeltaShape,
        projected: object,
        gates: object,
        conv: object,
        decay: object,
        dt_bias: object,
        norm: object,
        inputs: object,
        kept_gates: object,
        memory: object,
        out: object,
        eps: float,
    ) -> None: ...
    def fill_memory(self, data: object, value: float) -> None:
        """What read_memory is to read."""

    def read_ranges(self, of_node: Sequence[Sequence[ByteRange]]) -> float:
        """Reads each node's ranges once, with all workers."""

    def read_memory(self, data: object) -> float:
        """Reads once with all workers; returns a checksum."""

class RecurrentOps:
    """Recurrences, and what stands around them, on a pool."""

    def __init__(self, pool: WorkerPool, tier: str) -> None: ...
    def fold(
        self,
        batch: BatchView,
        corrects: bool,
        asked: object,
        written: object,
        values: object,
        decay: object,
        beta: object | None,
        memory: object,
        out: object,
    ) -> None: ...
    def channel_delta(
        self,
        batch: BatchView,
        mixed: object,
        forget: object,
        beta: object,
        behind: object,
        decay: object,
        bias: object,
        norm: object,
        kept_mixed: object,
        kept_forget: object,
        kept_beta: object,
        memory: object,
        out: object,
        eps: float,
        floor: float,
    ) -> None:
        """
        kept: what rows of draft tokens were given, in each sequence's slot [places, ...].
        """

    def convolve(
        self,
        batch: BatchView,
        rows: object,
        weights: object,
        bias: bool,
        gated: bool,
        ring: object,
        out: object,
    ) -> None: ...
    def state_space(
        self,
        batch: BatchView,
        groups: int,
        mixed: object,
        gate: object,
        steps: object,
        decay: object,
        bias: object,
        through: object,
        norm: object,
        memory: object,
        gated: object,
        out: object,
        eps: float,
    ) -> None:
        """gated: float32, what is left before the norm."""

class PatchOps:
    """
    Operations between a vision tower's products, on a pool: arrays of bfloat16 or float32.
    """

    def __init__(self, pool: WorkerPool, tier: str) -> None: ...
    def split(
        self, qkv: object, cos: object, sin: object, first: int, q: object, k: object, v: object
    ) -> None:
        """
        qkv [n, 3, heads, d] of patches first, first + 1 …; cos, sin float32 [patches, d / 2]. Writes q [heads, n, d],
        and rows first … of k and v [heads, patches, d]. q and k are turned.
        """

    def layer_norm(self, x: object, weight: object, bias: object, out: object, eps: float) -> None:
        """x, out [n, width], which may be the same."""

    def gelu(self, x: object, out: object) -> None:
        """By tanh; x, out [n, width], which may be the same."""

class Columns:
    """
    Runs (source, step, target, count) of columns, from one array to another.
    """

    def __init__(self, pool: WorkerPool, runs: Sequence[tuple[int, int, int, int]]) -> None: ...
    def copy(self, x: object, out: object) -> None:
        """
        out[:, target + i] = x[:, source + i * step], i < count; other columns of out stay as they are.
        """

class Streams:
    """
    Several streams in place of one residual: summed up for a block, and mixed.
    """

    def __init__(
        self,
        pool: WorkerPool,
        tier: str,
        streams: int,
        hidden: int,
        iterations: int,
        eps: float,
        norm_eps: float,
    ) -> None: ...
    def widen(self, x: object, wide: object, norms: object) -> None:
        """
        x [T, n, hidden] to float32 [T, n * hidden]; norms [T]: 1 over the root of each row's mean square.
        """

    def enter(
        self,
        x: object,
        sums: object,
        norms: object,
        scale: object,
        base: object,
        out: object,
        share: object | None,
        mixing: object | None,
    ) -> None:
        """
        Weights sums * norms * scale + base: out [T, hidden], and how a block's result returns; None: it does not.
        """

    def leave(self, x: object, y: object, share: object, mixing: object, out: object) -> None:
        """out [T, n, hidden]: x mixed, and y [T, hidden] shared out."""

class RowNumbers:
    """Numbers of a table's rows that n-grams of tokens name."""

    def __init__(
        self,
        longest: int,
        heads: int,
        stop: int,
        multipliers: Sequence[int],
        sizes: Sequence[int],
        offsets: Sequence[int],
    ) -> None: ...
    def find(self, ids: object, positions: object, slots: object, starts: object, out: object) -> int:
        """Numbers of a step's tokens; returns how many rows are written."""

    def last(self, out: object) -> int:
        """
        Numbers of the last step whose rows a reader was asked for; returns how many rows are written.
        """

    def text(self, ids: object, out: object) -> None:
        """Numbers of a text's tokens, but of those that only begin n-grams."""

    def copy(self, source: int, target: int) -> None:
        """A slot becomes another's copy."""

class RowReader:
    """Rows of a table by their numbers."""

    @overload
    def __init__(self, name: str, rows: object, threads: int) -> None:
        """Rows in memory."""

    @overload
    def __init__(
        self,
        name: str,
        files: Sequence[tuple[str, int]],
        ranges: Sequence[tuple[int, int, int]],
        row_bytes: int,
        direct: bool,
        threads: int,
    ) -> None:
        """
        files: path and open descriptor, which stays the caller's; ranges: file, first byte, rows.
        """

    def read(self, numbers: object, rows: object) -> None: ...
    def read_step(
        self, numbers: RowNumbers, ids: object, positions: object, slots: object, starts: object, out: object
    ) -> int:
        """Rows of a step's tokens; returns of how many."""

    def read_ahead(self, numbers: object) -> None:
        """These rows will be needed soon."""

    @property
    def waited(self) -> int:
        """Rows that a read had to wait for, since the start."""

    @property
    def ahead(self) -> int:
        """Rows that were read before anybody needed them, since the start."""

class TokenIndex:
    """Which tokens each row attends to, on a pool."""

    def __init__(
        self,
        pool: WorkerPool,
        tier: str,
        heads: int,
        dim: int,
        half: int,
        budget: int,
        neighbours: bool,
        tokens: int,
    ) -> None: ...
    def choose(
        self,
        batch: BatchView,
        q: object,
        k: object | None,
        gates: object,
        norm: object,
        bias: object,
        cos: object,
        sin: object,
        pages: object,
        chosen: object,
        counts: object,
        eps: float,
    ) -> None: ...

class ChosenAttention:
    """Attention whose rows see chosen tokens; keys are values, too."""

    def __init__(self, pool: WorkerPool, tier: str) -> None: ...
    def attend(
        self,
        batch: BatchView,
        q: object,
        pages: object,
        chosen: object,
        counts: object,
        out: object,
        scale: float,
    ) -> None: ...

class Workspace:
    """
    A worker pool, the kernels of a tier, and scratch for one call at a time.
    """

    def __init__(
        self,
        pool: WorkerPool,
        tier: str,
        tile_from_rows: int = -1,
        digits_below_rows: int = -1,
        one_way: bool = False,
    ) -> None:
        """
        Numbers >= 0 replace the tier's own choice of algorithm; one_way: none depends on the number of rows.
        """

    @property
    def tier(self) -> str: ...
    def tile_from_rows(self, format: str) -> int:
        """From this many rows on, tile_mm is used."""

    def multiply_add(self, rounds: int, format: str, int8_activations: bool = False) -> int:
        """
        Multiply-adds in registers on all workers, in the format's compute type or of integers: how many.
        """

class PackedMatrix:
    """A packed weight matrix [N, K]."""

    def __init__(
        self, workspace: Workspace, weights: list, bias: object | None, format: WeightFormat
    ) -> None:
        """
        Of blocks of rows that follow each other; all but the last of a multiple of 16 rows.
        """

    @staticmethod
    def from_codes(
        workspace: Workspace, codes: Codes, rows: int, depth: int, bias: object | None
    ) -> PackedMatrix:
        """Of codes and scales, as they are."""

    def multiply(self, x: object, out: object, int8_activations: bool = False) -> None:
        """out[T, N] = x[T, K] @ weight.T + bias"""

    @property
    def bytes(self) -> ByteRange: ...
    def read_next(self, upcoming: Sequence[ByteRange]) -> None:
        """Weights that are read after this matrix: idle workers fetch them."""

    def multiply_heads(self, x: object, out: object) -> None:
        """
        out[T, H, N / H] = x[T, H, K], each head times its own N / H rows of the matrix
        """

    def dequantise(self, out: object) -> None:
        """The weights that the codes stand for, float32 [N, K]."""

    @property
    def tier(self) -> str: ...
    def layout(self) -> tuple:
        """See csrc/bindings/names.h."""

    @property
    def packed_bytes(self) -> int: ...
    @property
    def shape(self) -> tuple: ...

def fit_groups(
    tier: str,
    weights: object,
    importance: object | None,
    codes: object,
    scales: object,
    low: float,
    high: float,
    targets: Sequence[float],
) -> None:
    """
    Fills codes int8 [n, K] and scales bfloat16 [n, K / group] for weights float32 [n, K], on the calling thread.
    """

class ExpertStore:
    """The routed experts of one layer: gated MLPs of equal shape."""

    def __init__(
        self,
        workspace: Workspace,
        experts: int,
        hidden: int,
        width: int,
        gate: WeightFormat,
        up: WeightFormat,
        down: WeightFormat,
        activation: str,
        alpha: float,
        limit: float,
        cpu_slots: int = 0,
        int8_activations: bool = False,
    ) -> None: ...
    def load(self, expert: int, gate: object, up: object, down: object) -> None: ...
    def set_biases(self, gate: object | None, up: object | None, down: object | None) -> None:
        """Of all experts, wherever they live: float32 [experts, rows]."""

    def load_all(self, ids: Sequence[int], experts: list) -> None:
        """
        These experts from tuples of gate, up and down, in one parallel region.
        """

    def pack_to(self, experts: list, out: object) -> None:
        """What load_all would make of them, one after the other in other memory."""

    def forward(self, x: object, ids: object, weights: object, out: object, add: bool) -> None: ...
    def bytes(self, first: int, count: int) -> list[ByteRange]:
        """Of the experts [first, first + count), for each memory node."""

    def read_next(self, upcoming: Sequence[ByteRange]) -> None:
        """Weights that are read after this layer: idle workers fetch them."""

    def layout(self) -> tuple:
        """Of gate_up and down, see layout_of in csrc/bindings/names.h."""

    def load_packed(self, expert: int, bytes: object) -> None:
        """The inverse of copy_packed."""

    def copy_packed(self, expert: int, out: object) -> None:
        """The packed bytes of one expert."""

    def copy_all(self, experts: Sequence[int], out: object) -> None:
        """The packed bytes of each, one after the other."""

    def load_from(self, other: ExpertStore, experts: Sequence[int]) -> None:
        """Copies them out of a layer packed alike."""

    def forget(self, expert: int) -> None:
        """It lives elsewhere from now on; its slot is free."""

    def reserve(self, expert: int) -> int:
        """A CPU slot for an expert on its way here, which nobody uses yet."""

    def assign(self, expert: int, cpu_slot: int) -> None:
        """The expert has arrived in the reserved slot."""

    def release(self, cpu_slot: int) -> None:
        """Nobody comes: the reserved slot is free."""

    def cpu_slot_of(self, expert: int) -> int:
        """The CPU slot that it lies in."""

    def pieces(self, cpu_slot: int) -> list[tuple[int, int, int]]:
        """(offset in the packed bytes, address, bytes) of each."""

    def all_cpu_slots(self) -> list[ByteRange]:
        """What CPU slots lie in, for each memory node; empty: nothing is loaded."""

    def own_memory(self) -> tuple[int, int]:
        """(address, bytes) of what CPU slots lie in; (0, 0): none, or in a file."""

    @property
    def in_place(self) -> bool:
        """Whether they are used where they were given."""

    @property
    def in_file(self) -> bool:
        """Whether they lie in a mapped file."""

    @property
    def loaded(self) -> int:
        """How many experts are here."""

    @property
    def tier(self) -> str: ...
    @property
    def bytes_per_expert(self) -> int: ...

class MappedFile:
    """
    A file mapped read-only; it stays mapped while packed weights lie in it.
    """

    def __init__(self, fd: int, bytes: int) -> None:
        """Throws OSError."""

    def __len__(self) -> int: ...
    def view(
        self, offset: int, length: int
    ) -> Annotated[memoryview, dict(dtype="uint8", shape=(None,), writable=False)]: ...

LAYOUT_VERSION: int = 6

def block_checksums(pool: WorkerPool, data: list, block_bytes: int, in_place: bool) -> list[int]:
    """
    XXH3 of each block of each array (XXH64 of one below 241), in parallel; not in place: read from mapped files.
    """

def copy_bytes(pool: WorkerPool, source: object, out: object) -> None:
    """On all workers; what lies in a mapped file is read from it."""

def xxh64(data: bytes) -> int: ...
def xxh3(data: bytes, tier: str) -> int:
    """Of more than 240 bytes."""

def matrix_bytes(matrix: PackedMatrix) -> tuple:
    """Panels and bias (float32), as they lie in memory."""

def matrix_format(matrix: PackedMatrix) -> tuple[str, int, str]:
    """Format, group, scale type."""

def adopt_matrix(
    workspace: Workspace,
    format: tuple[str, int, str],
    rows: int,
    depth: int,
    file: MappedFile,
    offset: int,
    bias: object | None,
) -> PackedMatrix:
    """A matrix whose panels lie in the file; bias may be empty."""

def expert_bytes(layer: ExpertStore) -> tuple:
    """Panels of all experts."""

def expert_formats(
    layer: ExpertStore,
) -> tuple[tuple[str, int, str], tuple[str, int, str], tuple[str, int, str]]:
    """Format, group, scale type of gate, of up and of down."""

def adopt_experts(layer: ExpertStore, file: MappedFile, offset: int) -> None:
    """The layer's experts, as they lie in the file."""

class Recording:
    """Operations with their arrays, to be run again; made inside `with`."""

    def __init__(self) -> None: ...
    def __enter__(self) -> Recording: ...
    def __exit__(self, arg0: object | None, arg1: object | None, arg2: object | None, /) -> None: ...
    def __len__(self) -> int: ...
    def run(self) -> None:
        """All operations again, in order."""

class Meanwhile:
    """Work in pieces of microseconds, see csrc/runtime/meanwhile.h."""

    def next(self) -> bool:
        """
        Does a piece; False: nothing can be done, now or any more. As the thread that answers posts.
        """

    def next_of_step(self) -> bool:
        """Likewise, a piece of the step's thread, which may call CUDA's driver."""

    @property
    def seconds(self) -> float:
        """That `next` took, all together."""

    @property
    def late_seconds(self) -> float:
        """Of these, what pieces took beyond their time."""

class Mailbox:
    """
    The CPU's end of the hand-off from a CUDA stream, see csrc/experts/handoff/mailbox.h.
    """

    def __init__(self, memory: object, tokens: int, hidden: int, top_k: int, late: bool = False) -> None: ...
    def add(self, layer: ExpertStore) -> int:
        """Returns the number that posts call the layer by."""

    def defer(self, layer: int, kept: int, routed: int) -> None:
        """
        Of a token's first `routed` experts only the `kept` of the largest weights are in this layer's answer.
        """

    def meanwhile(self, work: Meanwhile) -> None:
        """
        Pieces of it are done until the next `PostThread.finish`, while nothing is posted.
        """

    @property
    def is_open(self) -> bool:
        """Between `PostThread.begin` and the end of `finish`."""

    @property
    def posts(self) -> int: ...
    @property
    def experts_used(self) -> int:
        """By all posts, each expert counted once per post."""

    @property
    def wait_seconds(self) -> float:
        """Time spent until posts came."""

    @property
    def serve_seconds(self) -> float:
        """Time from posts to their answers."""

    @property
    def hinted(self) -> int:
        """Experts, each once per post."""

    @property
    def hits(self) -> int:
        """Of those, that the post asked for."""

    @property
    def bytes_ahead(self) -> int:
        """
        Of hinted experts' weights that were fetched before they were computed.
        """

    def reset(self) -> None:
        """After a failure, when no kernel of the stream is running any more."""

class PostThread:
    """Answers a mailbox's posts, see csrc/experts/handoff/post_thread.h."""

    def __init__(self, mailbox: Mailbox) -> None: ...
    def begin(self, posts: int, timeout_seconds: float) -> None:
        """
        Before a graph with so many posts is started; UNTIL_STOPPED: nobody knows how many.
        """

    def finish(self) -> None:
        """
        Returns when all posts are answered; raises what went wrong. Does pieces of `meanwhile` until then.
        """

    def cancel(self) -> None:
        """By any thread: `finish` raises; the GPU is told not to wait."""

    def stop(self) -> None:
        """By any thread: `begin(UNTIL_STOPPED)` ends once nothing is posted."""

    def end(self) -> None:
        """Cancels; nothing can be begun again."""

UNTIL_STOPPED: int = -1

SECOND_HALF: int = 1

LAST_POST: int = 2

def mailbox_offsets(tokens: int, hidden: int, top_k: int, late: bool = False) -> tuple:
    """
    Bytes at which x, ids, weights, result and hints begin, from the first half to the second, and in all.
    """

MOST_HINTED_TOKENS: int = 4

class MovingLayers:
    """
    Both sides of layers whose experts move, see csrc/experts/live/expert_moves.h.
    """

    def __init__(self) -> None: ...
    def add(self, cpu: ExpertStore, slot_of: object, slots: int, slot_count: int) -> None:
        """slot_of int32 [experts] is changed in place."""

    def add_none(self) -> None:
        """A layer that lives on one side only."""

class ExchangeTurn(Meanwhile):
    """
    Exchanges that are copied and end together, see csrc/experts/live/exchange_turn.h.
    """

    def __init__(
        self,
        layers: MovingLayers,
        functions: tuple[int, int],
        streams: tuple[int, int, int],
        tables: tuple[int, int, int],
        exchanges: Sequence[tuple[int, int, int, int]],
        stages: Sequence[int],
    ) -> None:
        """
        functions: cuMemcpyAsync, cuStreamQuery. streams: up, down, computing. tables: image, themselves, bytes.
        """

    def run(self, seconds: float) -> bool:
        """
        What can be done in this time, while no step is under way; returns whether all has ended.
        """

    def troubles(self) -> list:
        """
        (index, what became of it, keeps its stage, ends its layer, why) of each.
        """

    @property
    def bytes_given(self) -> int: ...

class UseDecision(Meanwhile):
    """
    Decisions of a virtual placement, a layer at a time, see use_decision.h.
    """

    def __init__(self, counts: object, seen: object, better: object, may: object, slot_of: object) -> None:
        """All [layers, experts], changed in place."""

    def begin(
        self,
        now: object,
        keep: float,
        least_gain: float,
        least_lead: float,
        least_hot: float,
        luck: float,
    ) -> None:
        """
        Another decision. now: of the type of `seen`, unchanged until `sums`.
        """

    def sums(self) -> tuple[int, int, int]:
        """
        Uses, uses * better, and how many experts' `better` is not 0; does what is left.
        """

    def exchange(self, room: int) -> list[tuple[int, int, int, int]]:
        """
        (layer, slot, leaving, coming) of each that was made, most worthwhile first; does what is left.
        """

def add_uses(counts: object, now: object, seen: object | None, better: object, keep: float) -> float:
    """
    counts = counts * keep + now - seen, seen = now; returns the sum of what was added * better.
    """

def pick_towards(
    scores: object,
    away: object,
    goal: object | None,
    idle: object,
    slot_of: object,
    rules: tuple[float, float, float],
    room: int,
) -> list[tuple[int, int, int, int]]:
    """
    (layer, slot, leaving, coming) of each, see csrc/experts/live/use_counts.h. rules: least gain, lead and score.
    """

def note_exchanges(
    made: Sequence[tuple[int, int, int, int]], slot_of: object, better: object, may: object
) -> None: ...
def copy_async(copy: int, source: int, target: int, bytes: int, stream: int) -> int:
    """Calls CUDA's cuMemcpyAsync at the address `copy`; 0, or its error."""

class ShmLane:
    """Sums between processes, see csrc/runtime/ranks/shm_lane.h."""

    def __init__(
        self,
        memory: object,
        rank: int,
        ranks: int,
        bytes: int,
        file: int,
        seconds: float,
        yields: bool,
        call: int = 0,
    ) -> None: ...
    def sum(self, rows: object) -> None:
        """Over rows [T, n], in place. Raises RankLost."""

    def gather(self, own: object, out: object, each: int) -> None:
        """own [T, bytes of this rank] -> out [T, bytes of all]. Raises RankLost."""

def shm_lane_bytes(ranks: int, bytes: int) -> int: ...
