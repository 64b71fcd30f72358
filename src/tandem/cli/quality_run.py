"""The run of `kt quality`: from flags to a comparison, and its result as tables and JSON."""

from __future__ import annotations

import dataclasses
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from tandem import __version__
from tandem.bench.rows import commit, write_json_file
from tandem.checkpoint import demo_dir, resolve_model
from tandem.engine.start.demo_model import prepare_demo
from tandem.engine.start.loader import use_one_torch_thread
from tandem.engine.start.shown_steps import shown_steps
from tandem.errors import ConfigError
from tandem.machine.machine import Machine
from tandem.quality import text as texts
from tandem.quality.compare import Candidate, CandidateResult, Comparison
from tandem.quality.saved_logits import Origin, SavedLogits, writing
from tandem.quality.stream import LayerStream, Variant
from tandem.quality.text import Windows
from tandem.text.tokenizer import Tokenizer

DEFAULT_METHODS = ("INT8", "INT4")


@dataclass(frozen=True, slots=True)
class QualityFlags:
    """The flags of a run."""

    model: str
    methods: tuple[str, ...] = ()
    reference: str | None = None
    reference_logits: Path | None = None
    save_logits: Path | None = None
    keep: int = 1024
    text: Path | None = None
    tokens: int = 4096
    window: int = 512
    layer_kl: bool = False
    int8_activations: bool = False  # beside the usual ones
    gpu_shares: tuple[float, ...] = ()  # of the experts, on a GPU; (): computed on the CPU
    deferred: int = 0  # experts of a token, beside the usual way
    cached: str | None = None  # dtype of keys and values, beside the usual one
    dtype: str = "auto"
    reference_dtype: str = "auto"
    tier: str = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.reference_logits and (self.reference or self.save_logits or self.layer_kl):
            raise ConfigError(
                "--reference-logits stands for the reference: leave out --reference, --save-logits and --layer-kl"
            )

        if self.deferred and self.layer_kl:
            raise ConfigError(
                "--layer-kl measures a layer alone, but deferred experts are added in the next one: leave out "
                "--layer-kl or --kt-max-deferred-experts-per-token"
            )

    @property
    def measured(self) -> tuple[str | None, ...]:
        """Expert formats to measure; None: as stored. Saving logits alone measures nothing else."""
        if self.methods:
            return self.methods
        if (
            self.reference
            or self.reference_logits
            or self.dtype != self.reference_dtype
            or self.tier != "auto"
            or self.gpu_shares
            or self.deferred
            or self.cached
        ):
            return (None,)
        return () if self.save_logits else DEFAULT_METHODS

    def variants(self, directory: Path) -> list[tuple[str, Variant]]:
        """Variants that are measured, each with its label."""
        modes = (False, True) if self.int8_activations else (False,)
        nowhere = (None,) if self.cached is None else (0.0,)  # only a GPU has another KV cache
        shares: tuple[float | None, ...] = self.gpu_shares or nowhere
        combinations = [
            Variant(directory, method, self.dtype, self.tier, self.threads, mode, share, deferred, cached)
            for method in self.measured
            for mode in modes
            for share in shares
            for deferred in ((0, self.deferred) if self.deferred else (0,))
            for cached in ((self.cached, "auto") if self.cached else ("auto",))  # the first says what it lacks
        ]
        return [(_label(variant), variant) for variant in combinations]


def _label(variant: Variant) -> str:
    label = (variant.method or "as stored") + (" A8" if variant.int8_activations else "")
    if variant.gpu_share is not None:
        label += f", {variant.gpu_share:.0%} on the GPU"
    label += f", {variant.deferred} deferred" if variant.deferred else ""
    return label if variant.cached == "auto" else f"{label}, KV cache {variant.cached}"


@dataclass(frozen=True, slots=True)
class QualityReport:
    """The JSON of `--out`. KL in nats; errors by layer as fractions."""

    model: str
    reference: str
    reference_perplexity: float | None
    kl_is_exact: bool  # False: lower bounds, the saved reference had only its largest logits
    measured: tuple[CandidateResult, ...]
    text: str
    text_digest: str
    predictions: int
    window: int
    machine: str
    version: str
    commit: str | None
    command: str
    date: str


def run(request: QualityFlags, out: Path | None, plot: Path | None) -> QualityReport:
    if plot is not None:
        from tandem.bench.figures import check_matplotlib

        check_matplotlib()
    console = Console()
    report = measure(request)
    for table in tables(report):
        console.print(table)
    if out is not None:
        write_json_file(dataclasses.asdict(report), out)
        console.print(f"Written to {out}")
    if plot is not None:
        from tandem.cli.quality_plot import draw

        draw(plot, report.measured)
        console.print(f"Drawn to {plot}")
    return report


def measure(request: QualityFlags) -> QualityReport:
    """Runs the comparison; stderr says how far it is. Raises ConfigError, CheckpointError."""
    use_one_torch_thread()
    directory = _directory(request.model)
    windows = texts.cut(Tokenizer.load(directory), _text(request), request.window, request.tokens)
    with shown_steps("opening", TimeElapsedColumn(), TimeRemainingColumn()) as report:
        comparison = _comparison(request, directory, windows, report)
        with _writer(request, comparison) as writer:
            perplexity, measured = comparison.run(writer, request.keep)
    return _report(request, windows, perplexity, measured, comparison)


def _directory(name: str) -> Path:
    directory = resolve_model(name)
    return prepare_demo(directory) if directory == demo_dir() else directory


def _text(request: QualityFlags) -> str:
    return texts.default_text() if request.text is None else texts.read_text(request.text)


def _comparison(request: QualityFlags, directory: Path, windows: Windows, report: Any) -> Comparison:
    reference: LayerStream | SavedLogits
    pool = None
    if request.reference_logits is not None:
        reference = SavedLogits(request.reference_logits)
    else:
        theirs = _directory(request.reference) if request.reference else directory
        reference = LayerStream(
            Variant(theirs, None, request.reference_dtype, "auto", request.threads), windows
        )
        pool = reference.pool
    candidates = []
    for label, variant in request.variants(directory):
        stream = LayerStream(variant, windows, pool)
        pool = stream.pool
        candidates.append(Candidate(label, stream))
    if isinstance(reference, SavedLogits):
        reference.origin.check(windows, candidates[0].stream.config.vocab, reference.file)
    return Comparison(windows, reference, candidates, layer_kl=request.layer_kl, progress=report)


def _writer(request: QualityFlags, comparison: Comparison) -> Any:
    if request.save_logits is None or comparison.reference is None:
        return nullcontext()
    vocab, windows = comparison.reference.config.vocab, comparison.windows
    logits = min(request.keep or vocab, vocab)
    origin = Origin(_reference_label(request), windows.digest, len(windows.predicting), vocab, logits)
    return writing(request.save_logits, origin)


def _reference_label(request: QualityFlags) -> str:
    return request.reference or request.model


def _report(
    request: QualityFlags,
    windows: Windows,
    perplexity: float | None,
    measured: list[CandidateResult],
    comparison: Comparison,
) -> QualityReport:
    saved, machine = comparison.saved, Machine.detect()
    return QualityReport(
        model=request.model,
        reference=saved.origin.label if saved else _reference_label(request),
        reference_perplexity=perplexity,
        kl_is_exact=saved is None or saved.origin.complete,
        measured=tuple(measured),
        text=str(request.text or "default"),
        text_digest=windows.digest,
        predictions=len(windows.predicting),
        window=request.window,
        machine=f"{machine.cpu_model}, {request.threads or machine.max_threads} threads",
        version=__version__,
        commit=commit(),
        command=" ".join(["kt", *sys.argv[1:]]),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def tables(report: QualityReport) -> list[Table]:
    """The summary, then errors by layer where there is a reference model."""
    parts = [_summary(report)]
    if any(each.layers for each in report.measured):
        parts.append(_layer_table(report.measured))
    return parts


def _summary(report: QualityReport) -> Table:
    bound = "" if report.kl_is_exact else "; KL of the saved tokens, a lower bound"
    title = (
        f"{report.predictions} predictions of {report.model}; KL in nats against {report.reference}{bound}"
    )
    # Narrow gaps: on 80 columns no heading is cut.
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("measured")
    for name in ("perplexity", "change", "KL mean", "±", "median", "99 %", "same top"):
        table.add_column(name, justify="right")
    base = report.reference_perplexity
    if base is not None:
        table.add_row("reference", f"{base:.4f}", *("",) * 6)
    for each in report.measured:
        change = "" if base is None else f"{each.perplexity / base - 1:+.2%}"
        d = each.divergence
        rest: tuple[str, ...] = ("",) * 5
        if d is not None:
            numbers = (d.mean, d.error, d.median, d.percentile_99)
            rest = (*(f"{number:.5f}" for number in numbers), f"{d.same_top:.2%}")
        table.add_row(each.label, f"{each.perplexity:.4f}", change, *rest)
    return table


def _layer_table(measured: tuple[CandidateResult, ...]) -> Table:
    title = "Relative error of hidden states by layer"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("layer", justify="right")
    for each in measured:
        table.add_column(f"{each.label} own", justify="right")
        table.add_column(f"{each.label} total", justify="right")
        if each.layers and each.layers[0].kl is not None:
            table.add_column(f"{each.label} KL alone", justify="right")
    for index in range(max(len(each.layers) for each in measured)):
        table.add_row(str(index), *(cell for each in measured for cell in _layer_cells(each, index)))
    return table


def _layer_cells(measured: CandidateResult, index: int) -> list[str]:
    error = measured.layers[index]
    cells = [f"{error.own:.3%}", f"{error.total:.3%}"]
    return cells if error.kl is None else [*cells, f"{error.kl:.6f}"]
