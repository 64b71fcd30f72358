"""`compare`: formats of experts × shares of them on the GPU, ranked by how fast they would decode."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.errors import ConfigError, DoesNotFit
from tandem.planner.forecast.advice import PlanQuestion, roundings
from tandem.planner.forecast.ledger import RAM, VRAM
from tandem.planner.forecast.prediction import Range
from tandem.planner.plan import Plan
from tandem.planner.ways import with_way

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True)
class ComparedPlan:
    """gpu_share of the experts, None: what fits was asked for. bytes; why: the first reason why it cannot be done, ""
    where it can; fits: memory is not the reason."""

    method: str
    gpu_share: float | None
    planned_share: float = 0.0
    vram_bytes: int = 0
    ram_bytes: int = 0
    decode: Range | None = None
    prompt: Range | None = None
    lossy: bool = False
    why: str = ""
    fits: bool = True


def compare(question: PlanQuestion) -> list[ComparedPlan]:
    """Rows of the comparison: possible settings first, the fastest on top, then impossible ones with their reasons."""
    shares: tuple[float | None, ...] = (None, *SHARES) if question.machine.gpus else (None,)
    methods: tuple[str | None, ...] = (None, *roundings(question.stored))
    rows = [_row(question, method, share) for method in methods for share in shares]
    alike = {(row.method, round(row.planned_share, 3)): row for row in rows if not row.why}
    possible = sorted(alike.values(), key=lambda row: -(row.decode.middle if row.decode else 0.0))
    return [*possible, *(row for row in rows if row.why)]


def compared_plan(question: PlanQuestion) -> ComparedPlan:
    """Row of the question as it is."""
    return _row(question, None, None)


def _row(question: PlanQuestion, method: str | None, share: float | None) -> ComparedPlan:
    name = method or "as stored"
    changes: dict[str, object] = {} if method is None else {"kt_method": method}
    changes |= {} if share is None else {"kt_gpu_experts_ratio": share, "kt_num_gpu_experts": None}
    question, _ = with_way(question, **changes)
    try:
        plan = question.plan()
    except ConfigError as error:
        return ComparedPlan(
            name,
            share,
            lossy=method is not None,
            why=error.reasons[0],
            fits=not isinstance(error, DoesNotFit),
        )
    predicted = question.predicted(plan)
    totals = {ledger.place: ledger.total_bytes for ledger in plan.ledgers}
    return ComparedPlan(
        name, share, _planned_share(question, plan), totals.get(VRAM, 0), totals.get(RAM, 0), predicted.decode[1],
        predicted.prompt, method is not None,
    )  # fmt: skip


def _planned_share(question: PlanQuestion, plan: Plan) -> float:
    everyone = question.model.routed_experts
    return plan.gpu.sizes.experts / everyone if plan.gpu is not None and everyone else 0.0
