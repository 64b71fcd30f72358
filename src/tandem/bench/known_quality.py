"""`quality_line`: what rounding is known to cost the model whose speed was measured."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.planner.forecast.quantisations import UNROUNDED, figures_of


@dataclass(frozen=True, slots=True)
class MeasuredExperts:
    """Experts whose speed was measured. shares: of their weights, by format. as_stored: not rounded while loading."""

    shares: tuple[tuple[str, float], ...]
    int8_activations: bool = False
    as_stored: bool = False

    @property
    def rounded(self) -> bool:
        return self.int8_activations or any(name.lower() not in UNROUNDED for name, _ in self.shares)

    @property
    def name(self) -> str:
        return " + ".join(name.upper() for name, _ in self.shares) + (" A8" if self.int8_activations else "")


def quality_line(model: str, is_demo: bool, experts: MeasuredExperts) -> str | None:
    """The demo model's KL, and how to measure another model's; None where nothing is rounded."""
    if not experts.rounded:
        return None
    known = _known(experts)
    if known is None:
        return f"{experts.name}: what it costs is not known here; {_command(model, experts)} measures it"
    if is_demo:
        return f"{experts.name}: {known} (docs/quality.md)"
    return f"{experts.name}: {known} in the demo model (docs/quality.md); {_command(model, experts)} measures it"


def _known(experts: MeasuredExperts) -> str | None:
    """None: one of the formats was not measured. Where several are mixed, KL is weighed by their weights."""
    figures = [(share, figures_of(name, experts.int8_activations)) for name, share in experts.shares]
    known = [(share, each) for share, each in figures if each is not None]
    if not known or len(known) < len(figures):
        return None
    if len(known) > 1:
        return f"KL {sum(share * each['kl'] for share, each in known):.5f} nats against bf16"
    (_, one), *_ = known
    kl = f"{one['kl']:.5f} ± {one['kl_error']:.5f}"
    return f"KL {kl} nats against bf16, the same top token at {one['same_top']:.1%}"


def _command(model: str, experts: MeasuredExperts) -> str:
    formats = [f"--format {name.upper()}" for name, _ in experts.shares]
    flags = ["--reference ORIGINAL"] if experts.as_stored else formats
    return " ".join(["kt quality", model, *flags, *["--kt-int8-activations"] * experts.int8_activations])
