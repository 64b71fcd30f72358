"""Gated delta nets on a GPU (or interpreted) against the token by token reference in float64.

Tolerances are of the root mean square, relative. In float32 (the interpreter) a row sums k_dim products and what it
learns goes on for its length: (k_dim + rows) * 2^-24, times 8 for the sums of a chunk. In bfloat16 some ten numbers on
the way are rounded, q, k, v, memory, what is solved, learnt and read: sqrt(10 / 3) * 2^-9, three times that where
terms cancel. A single row may be worse: the norm makes a query that finds little as large as others, and its error.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gpu import AVAILABLE, DEVICE, INTERPRETED, needs_triton
from tandem.mechanisms.delta_net.shape import DeltaRule
from tandem.mechanisms.delta_net.torch import DeltaState, DeltaWeights, Product, TorchDelta
from tandem.models.batch import ForwardBatch
from tandem.spec.norm import Norm

if AVAILABLE:
    from tandem.kernels.gpu.linear import GpuLinear
    from tandem.mechanisms.delta_net.gpu import prompt as prompt_module
    from tandem.mechanisms.delta_net.gpu.net import GpuDelta
    from tandem.mechanisms.delta_net.gpu.step import MOST_HIDDEN, multiplies

pytestmark = [pytest.mark.gpu, needs_triton]
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
SLOTS = 6
AWKWARD = DeltaRule(2, 6, 20, 40, 4, Norm(1e-6), "heads")
FITTING = DeltaRule(2, 4, 32, 16, 3, Norm(1e-6), "kinds", "sigmoid")
REAL = DeltaRule(16, 32, 128, 128, 4, Norm(1e-6), "heads")
SHAPES = [AWKWARD, FITTING] if INTERPRETED else [AWKWARD, FITTING, REAL, replace(REAL, layout="kinds", gate="sigmoid")]

Part = tuple[int, int, int]  # slot, tokens before, new rows


def weights(shape: DeltaRule) -> DeltaWeights:
    generator = torch.Generator().manual_seed(3)
    return DeltaWeights(
        torch.randn(shape.conv, shape.channels, generator=generator),
        -torch.rand(shape.v_heads, generator=generator) * 3, torch.randn(shape.v_heads, generator=generator),
        (torch.rand(shape.v_dim, generator=generator) + 0.5).to(DTYPE),
    )  # fmt: skip


def states(shape: DeltaRule, draft_tokens: int) -> DeltaState:
    """Full of NaN: what is not there yet must not be read. In one buffer, slot by slot, as the engine has them."""
    places = shape.conv + 2 * draft_tokens
    sizes = places * shape.channels, places * 2 * shape.v_heads, shape.v_heads * shape.k_dim * shape.v_dim
    firsts = [-(-size * DTYPE.itemsize // 256) * 64 for size in sizes[:2]]
    whole = torch.full((SLOTS, sum(firsts) + sizes[2]), float("nan"), device=DEVICE)
    inputs = whole[:, : firsts[0]].view(DTYPE)[:, : sizes[0]]
    gates = whole[:, firsts[0] : sum(firsts)].view(DTYPE)[:, : sizes[1]]
    for each in (inputs, gates):
        each.copy_(torch.full(each.shape, float("nan"), dtype=DTYPE, device=DEVICE))
    memory = whole[:, sum(firsts) :].view(SLOTS, shape.v_heads, shape.k_dim, shape.v_dim)
    return DeltaState(inputs.view(SLOTS, places, -1), gates.view(SLOTS, places, -1), memory)


def batch(parts: list[Part], single: int = 0) -> ForwardBatch:
    starts = torch.tensor([0, *(new for _, _, new in parts)]).cumsum(0)
    empty = torch.zeros(int(starts[-1]), dtype=torch.int64, device=DEVICE)
    return ForwardBatch(
        empty, empty, empty, starts.int().to(DEVICE),
        torch.tensor([before + new for _, before, new in parts], dtype=torch.int32, device=DEVICE),
        torch.zeros(len(parts), 64, dtype=torch.int32, device=DEVICE), empty[:1],
        torch.tensor([slot for slot, _, _ in parts], dtype=torch.int32, device=DEVICE), single,
    )  # fmt: skip


class Case:
    """Sequences with inputs of their own: row t of slot s is the same in every cut."""

    def __init__(self, shape: DeltaRule, longest: int, draft_tokens: int = 0) -> None:
        self.shape, self.weights = shape, weights(shape)
        generator = torch.Generator().manual_seed(1)
        self.wide = torch.randn(SLOTS, longest, shape.channels + shape.values, generator=generator).to(DTYPE)
        self.narrow = torch.randn(SLOTS, longest, 2 * shape.v_heads, generator=generator).to(DTYPE)
        self.states = states(shape, draft_tokens)
        self.delta = GpuDelta(shape, DeltaWeights(*(w.to(DEVICE) for w in self.weights)))

    def rows(self, x: Tensor, parts: list[Part]) -> Tensor:
        return torch.cat([x[slot, before : before + new] for slot, before, new in parts])

    def run(self, parts: list[Part], single: int = 0) -> list[Tensor]:
        """Results of each part."""
        rows = (self.rows(x, parts).to(DEVICE) for x in (self.wide, self.narrow))
        out = self.delta(*rows, batch(parts, single), self.states)
        return list(out.cpu().split([new for _, _, new in parts]))

    def expected(self, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """Of the whole sequence at once, in float64: results, memory."""
        exact = TorchDelta(self.shape, DeltaWeights(*(w.double() for w in self.weights)))
        kept = DeltaState(*(torch.zeros(s.shape, dtype=torch.float64) for s in self.states))
        parts = replace(batch([(slot, 0, length)]))
        cpu = ForwardBatch(
            *(getattr(parts, name).cpu() for name in (
                "input_ids", "positions", "cache_slots", "query_starts", "seq_lens", "block_tables", "logits_rows",
                "slots")),
        )  # fmt: skip
        out = exact(self.wide[slot, :length].double(), self.narrow[slot, :length].double(), cpu, kept)
        return out, kept.memory[slot]

    def check(self, slot: int, got: Tensor, first: int = 0) -> None:
        """got: rows from `first` on; afterwards the memory is theirs."""
        length = first + len(got)
        expected, memory = self.expected(slot, length)
        near(got, expected[first:], self.tolerance(length))
        near(self.states.memory[slot].cpu(), memory, self.tolerance(length))

    def tolerance(self, length: int) -> float:
        return 8 * (self.shape.k_dim + length) * 2.0**-24 if INTERPRETED else 3 * (10 / 3) ** 0.5 * 2.0**-9


def near(got: Tensor, expected: Tensor, tolerance: float) -> None:
    """Together; and no row is another's, or one of nobody."""
    assert got.isfinite().all()
    error = got.double() - expected
    total = float(error.norm() / expected.norm())
    assert total <= tolerance, f"{total:.2e} of {tolerance:.2e}"
    assert (error.flatten(1).norm(dim=1) <= expected.flatten(1).norm(dim=1) / 4).all()


def untouched(case: Case, slots: list[int]) -> None:
    assert all(state[slots].isnan().all() for state in case.states)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_that_decode(shape: DeltaRule) -> None:
    """From nothing, several sequences of different lengths, each through the whole ring of inputs."""
    case = Case(shape, 9)
    late = [case.run([(3, t, 1)])[0] for t in range(3)]
    both = [case.run([(1, t, 1), (3, 3 + t, 1)]) for t in range(6)]
    case.check(1, torch.cat([one for one, _ in both]))
    case.check(3, torch.cat([*late, *(other for _, other in both)]))
    untouched(case, [0, 2, 4, 5])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("hidden", [40, 2048])
def test_rows_that_decode_make_their_gates(shape: DeltaRule, hidden: int) -> None:
    """Alone, beside others, and beside a prompt, whose gates are made before. In bfloat16 gates are rounded once more,
    sums of `hidden` products in another order."""
    case, generator = Case(shape, 9), torch.Generator().manual_seed(5)
    x = torch.randn(SLOTS, 9, hidden, generator=generator).to(DTYPE)
    weight = (torch.randn(2 * shape.v_heads, hidden, generator=generator) / hidden**0.5).to(DTYPE)
    matrix = GpuLinear(weight, None, "f32" if INTERPRETED else "bf16", DEVICE)
    case.narrow = (x.double() @ weight.double().T).to(DTYPE)

    def run(parts: list[Part], single: int) -> list[Tensor]:
        product = Product(case.rows(x, parts).to(DEVICE), matrix)
        assert multiplies(product)
        out = case.delta(case.rows(case.wide, parts).to(DEVICE), product, batch(parts, single), case.states)
        return list(out.cpu().split([new for _, _, new in parts]))

    late = [run([(3, t, 1)], 1)[0] for t in range(3)]
    both = [run([(1, t, 1), (3, 3 + t, 1)], 2) for t in range(4)]
    last, prompt = run([(1, 4, 1), (4, 0, 7)], 1)
    case.check(1, torch.cat([*(one for one, _ in both), last]))
    case.check(3, torch.cat([*late, *(other for _, other in both)]))
    case.check(4, prompt)


def test_other_gates_are_made_before() -> None:
    x, wide = torch.zeros(1, 8, dtype=DTYPE, device=DEVICE), torch.zeros(1, 2 * MOST_HIDDEN, device=DEVICE)
    matrix = GpuLinear(torch.zeros(4, 8), torch.zeros(4), "f32", DEVICE)
    long = GpuLinear(torch.zeros(4, 2 * MOST_HIDDEN), None, "f32", DEVICE)
    for gates in (Product(x, matrix), Product(wide, long), Product(x, lambda rows: rows), x):
        assert not multiplies(gates)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prompts_of_any_lengths_together(shape: DeltaRule) -> None:
    case = Case(shape, 200)
    parts = [(2, 0, 64), (4, 0, 3), (1, 0, 130), (5, 0, 65)]
    for (slot, _, _), got in zip(parts, case.run(parts), strict=True):
        case.check(slot, got)
    untouched(case, [0, 3])


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 15, 63, 64, 65, 100, 127])
def test_a_prompt_cut_anywhere_goes_on_from_its_state(cut: int) -> None:
    """Then it decodes; the ring of inputs goes from one kind of kernel to the other."""
    case = Case(AWKWARD, 131)
    (first,) = case.run([(2, 0, cut)])
    (second,) = case.run([(2, cut, 128 - cut)])
    rest = [case.run([(2, 128 + i, 1)])[0] for i in range(3)]
    case.check(2, torch.cat([first, second, *rest]))


def test_rows_decode_beside_prompts() -> None:
    case = Case(AWKWARD, 90)
    before = case.run([(1, 0, 5), (4, 0, 40)])
    got = case.run([(1, 5, 1), (4, 40, 1), (3, 0, 70), (5, 0, 1)], single=2)
    case.check(1, torch.cat([before[0], got[0]]))
    case.check(4, torch.cat([before[1], got[1]]))
    case.check(3, got[2])
    case.check(5, got[3])


@pytest.mark.parametrize("real", [0, 1, 3])
def test_rows_of_nobody_are_copies_and_fold_nothing(real: int) -> None:
    """A graph is filled up with copies of its last row, in slot 0: what they write into pages must be the same."""
    case = Case(AWKWARD, 4)
    parts = [(1, 0, 1), (2, 0, 1), (3, 0, 1)][:real]
    last = case.rows(case.wide, parts[-1:])[0] if real else case.wide[0, 0]
    case.wide[0, 0], case.narrow[0, 0] = last, case.narrow[parts[-1][0] if real else 0, 0]
    got = case.run([*parts, *[(0, 0, 1)] * 4])
    for copy in got[real:]:
        assert torch.equal(copy, got[real - 1] if real else torch.zeros_like(copy))
    for (slot, _, _), rows in zip(parts, got, strict=False):
        case.check(slot, rows)
    untouched(case, [0, 4, 5])


def tried(parts: list[tuple[int, int, int, int]], single: int = 0, apart: bool = True) -> ForwardBatch:
    """(slot, tokens before, those that its memory holds, new rows) of each sequence; apart: rows are sequences."""
    if not apart:
        made = batch([(slot, before, new) for slot, before, _, new in parts], single)
        state_lens = [state_lens for _, _, state_lens, _ in parts]
    else:
        made = batch([(slot, before + i, 1) for slot, before, _, new in parts for i in range(new)])
        state_lens = [state_lens for _, _, state_lens, new in parts for _ in range(new)]
    return replace(made, state_lens=torch.tensor(state_lens, dtype=torch.int32, device=DEVICE))


STEPS = [(3, 3), (3, 0), (0, 0), (3, 2), (2, 2), (1, 0), (0, 0), (3, 3), (3, 1), (1, 1)][: 4 if INTERPRETED else None]
"""Draft tokens of a step, and how many of them are accepted."""


class Trial(Case):
    """A prompt of 5 in slot 2, then steps with draft tokens beside a sequence in slot 4 that has none."""

    def __init__(self, shape: DeltaRule, places: int = 3) -> None:
        super().__init__(shape, 40, places)
        self.wrong = [-x for x in (self.wide, self.narrow)]
        self.known = self.state_lens = 5
        rows = [torch.cat((x[2, :5], x[4, :2])).to(DEVICE) for x in (self.wide, self.narrow)]
        before = tried([(2, 0, 0, 5), (4, 0, 0, 2)], apart=False)
        self.got = [self.delta(*rows, before, self.states).cpu()[:5]]
        self.others, self.other_known = [], 2

    def go(self, draft_tokens: int, right: int, copies: int = 0) -> Tensor:
        """copies: of slot 0, which fill up a graph. Returns their rows."""
        known, rows = self.known, []
        for x, wrong in zip((self.wide, self.narrow), self.wrong, strict=True):
            mine = torch.cat((x[2, known : known + 1 + right], wrong[2, known + 1 + right : known + 1 + draft_tokens]))
            both = torch.cat((x[4, self.other_known : self.other_known + 1], mine))
            rows.append(torch.cat((both, both[-1:].expand(copies, -1))).to(DEVICE))
        other = (4, self.other_known, self.other_known, 1)
        parts = [other, (2, known, self.state_lens, 1 + draft_tokens), (0, 0, 0, copies)]
        out = self.delta(*rows, tried(parts), self.states).cpu()
        self.others.append(out[:1])
        self.got.append(out[1 : 2 + right])
        self.other_known, self.state_lens, self.known = self.other_known + 1, known + 1, known + 1 + right
        return out[2 + draft_tokens :]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_accepted_drafts_are_folded_and_rejected_ones_leave_nothing(shape: DeltaRule) -> None:
    case, plain = Trial(shape), Trial(shape)
    for step in STEPS:
        case.go(*step)
    case.go(0, 0)
    while plain.known < case.known:
        plain.go(0, 0)
    got, expected = torch.cat(case.got), torch.cat(plain.got)
    case.check(2, got)
    case.check(4, torch.cat((torch.cat(case.others),)), 2)
    assert torch.equal(got, expected) or INTERPRETED  # NumPy's sums may differ by their surroundings
    untouched(case, [0, 1, 3, 5])


def test_a_prompt_goes_on_from_drafts_that_are_not_folded_yet() -> None:
    """A snapshot of such a sequence is taken up by a longer prompt, beside one that decodes."""
    case = Trial(AWKWARD)
    case.go(3, 3)
    first, parts = case.known, [(4, case.other_known, case.other_known, 1), (2, case.known, case.state_lens, 20)]
    rows = [torch.cat((x[4, 3:4], x[2, first : first + 20])).to(DEVICE) for x in (case.wide, case.narrow)]
    out = case.delta(*rows, tried(parts, single=1, apart=False), case.states).cpu()
    case.check(2, torch.cat((*case.got, out[1:])))
    case.check(4, torch.cat((*case.others, out[:1])), 2)


@pytest.mark.parametrize("draft_tokens", [0, 2])
def test_copies_have_the_last_row_s_result(draft_tokens: int) -> None:
    case = Trial(AWKWARD)
    copies = case.go(draft_tokens, draft_tokens, copies=3)
    assert len(copies) == 3 and all(torch.equal(copy, case.got[-1][-1]) for copy in copies)
    case.go(0, 0)
    case.check(2, torch.cat(case.got))
    untouched(case, [0, 1, 3, 5])


def test_a_graph_without_a_real_row_makes_zeros() -> None:
    case = Case(AWKWARD, 4, 3)
    rows = (x[0, :3].to(DEVICE) for x in (case.wide, case.narrow))
    assert case.delta(*rows, tried([(0, 0, 0, 3)]), case.states).eq(0).all()
    untouched(case, list(range(SLOTS)))


def test_warming_up_folds_nothing() -> None:
    case = Case(AWKWARD, 70)
    case.delta.warm_up()
    untouched(case, list(range(SLOTS)))
    case.check(2, case.run([(2, 0, 70)])[0])


@pytest.mark.skipif(INTERPRETED, reason="NumPy's sums may differ by their surroundings")
def test_a_row_that_decodes_is_the_same_in_every_batch() -> None:
    case, other = Case(REAL, 40), Case(REAL, 40)
    for each in (case, other):
        each.run([(1, 0, 17), (2, 0, 30), (3, 0, 8)])
    together = case.run([(1, 17, 1), (2, 30, 1), (3, 8, 1)])
    alone = [other.run([part])[0] for part in [(1, 17, 1), (2, 30, 1), (3, 8, 1)]]
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
    assert torch.equal(case.states.memory[1:4], other.states.memory[1:4])


def test_equal_keys_that_are_all_learnt_do_not_blow_up() -> None:
    """The inverse within a chunk: with equal keys, beta 1 and no decay its powers would cancel 10^18."""
    shape = replace(FITTING, conv=2)
    case = Case(shape, 128)
    case.wide[1] = case.wide[1, :1]
    case.narrow[1, :, : shape.v_heads], case.narrow[1, :, shape.v_heads :] = 20.0, -20.0
    (got,) = case.run([(1, 0, 128)])
    case.check(1, got)


def test_memory_that_is_kept_for_long_is_not_lost() -> None:
    """A decay whose softplus is far below float32's step at 1."""
    shape = replace(FITTING, conv=2)
    case = Case(shape, 300)
    case.narrow[1, :, shape.v_heads :] = -12.0
    (got,) = case.run([(1, 0, 300)])
    case.check(1, got)


@pytest.mark.skipif(
    not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9,
    reason="Hopper has room for two stages; Triton 3.6 compiles one wrongly there (its issues 10486 and 11366)",
)
def test_the_smaller_tile_of_other_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_module, "shared_bytes", lambda device: 0)
    prompt_module.options.cache_clear()
    case = Case(AWKWARD, 100)
    case.check(1, case.run([(1, 0, 100)])[0])
    prompt_module.options.cache_clear()
