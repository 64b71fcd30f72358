"""vLLM with Tandem's experts beside Tandem itself, in turns, on one GPU: Qwen3-30B-A3B's shape, made-up weights.

    PYTHONPATH=src:VLLM python benchmarks/peers/vllm_plugin.py --out rows.jsonl --logs FOLDER

vLLM may lie in a folder of PYTHONPATH; the plug-in's entry point must be found there, too. Engines are processes. Of a
group they start together and decode in turns; a row is written when it is known, so a failure costs its own rows.
Groups: no expert on the GPU, half of them, and all (vLLM's own experts in bf16 beside Tandem's in int4, then in bf16).

Rows: {"bench": "vllm_plugin", "graphs": "full" | "piecewise", "gpu_share": …, "ratio": …, "handoff_us": …}; above 1:
vLLM with the plug-in is faster than Tandem. {"bench": "vllm_alone", "batch": …, "ratio": …}: above 1, Tandem is faster
than vLLM alone. `cpu_experts`: experts that the CPU computed for a layer, a step; both sides should have as many.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
SHAPE = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144, "norm_topk_prob": True,
    "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "hidden_act": "silu", "dtype": "bfloat16", "eos_token_id": 151645, "bos_token_id": 151643,
}  # fmt: skip
FEW, MANY = (1, 8), (1, 8, 64, 256)
STEPS = {1: 60, 8: 30, 64: 40, 256: 40}
LOAD_SECONDS, ASK_SECONDS = 150.0, 60.0
Point = tuple[Any, ...]
Samples = dict[Point, list[dict[str, Any]]]
Questions = dict[Point, tuple[str, dict[str, Any]]]


class Lost(Exception):
    """An engine that ended, or that did not answer in time."""


class Engine:
    """A process of `vllm_engines.py`. `ask` waits for its answer."""

    def __init__(self, name: str, kind: str, wishes: dict[str, Any], logs: Path) -> None:
        self.name, self._log = name, logs / f"{name}.log"
        self._log.unlink(missing_ok=True)
        program = str(Path(__file__).with_name("vllm_engines.py"))
        self._process = subprocess.Popen(
            [sys.executable, program, kind, json.dumps(wishes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._log.open("a"), text=True, start_new_session=True, env=os.environ | ENVIRONMENT,
        )  # fmt: skip
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            mark, _, rest = line.partition(" ")
            if mark == "ANSWER":
                self._answers.put(json.loads(rest))
            else:
                with self._log.open("a") as log:
                    log.write(line)
        self._answers.put(None)

    def answer(self, seconds: float) -> dict[str, Any]:
        """Raises Lost."""
        try:
            answer = self._answers.get(timeout=max(seconds, 0.1))
        except queue.Empty:
            raise Lost(f"{self.name}: no answer in {seconds:.0f} s; {self._end()}") from None
        if answer is None:
            self._answers.put(None)
            raise Lost(f"{self.name} ended: {self._end()}")
        return answer

    def ask(self, name: str, **named: Any) -> dict[str, Any]:
        """Raises Lost."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([name, named]) + "\n")
            self._process.stdin.flush()
        return self.answer(ASK_SECONDS)

    def _end(self) -> str:
        """Lines of the log that say why, or its last ones."""
        lines = self._log.read_text().splitlines()
        errors = [line for line in lines if "Error" in line and "initialization failed" not in line]
        return " | ".join((errors or lines)[-3:])[-700:]

    def cpu_percent(self, seconds: float) -> float:
        """CPU use of all its processes, in per cent of a core, while nothing is asked."""
        first = psutil.Process(self._process.pid)
        family = [first, *first.children(recursive=True)]
        used = lambda: sum(sum(each.cpu_times()[:2]) for each in family)  # noqa: E731
        before = used()
        sleep(seconds)
        return 100 * (used() - before) / seconds

    def end(self) -> None:
        """With all its processes, so that nobody has its memory."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_LOGGING_LEVEL": "INFO", "PYTHONUNBUFFERED": "1",
}  # fmt: skip


@dataclass
class Run:
    """One run of this program: its deadline, and what it has found out."""

    asked: argparse.Namespace
    model: str
    started: float = field(default_factory=perf_counter)
    attention: str = "TRITON_ATTN"
    threads: int | None = None

    def left(self) -> float:
        return float(self.asked.seconds - (perf_counter() - self.started))

    def row(self, **columns: Any) -> None:
        """Written at once."""
        row = columns | {"layers": self.asked.layers, "at_s": round(perf_counter() - self.started, 1)}
        print(json.dumps(row), flush=True)
        with self.asked.out.open("a") as out:
            out.write(json.dumps(row) + "\n")

    @contextmanager
    def engines(self, bench: str, wishes: dict[str, tuple[str, dict[str, Any]]]) -> Iterator[dict[str, Engine]]:
        """Those that are ready; a row says why another one is not. All of them end with the block."""
        started = {name: Engine(name, kind, each, self.asked.logs) for name, (kind, each) in wishes.items()}
        ready = dict[str, Engine]()
        try:
            for name, engine in started.items():
                try:
                    seconds = engine.answer(min(LOAD_SECONDS, self.left()))["ready"]
                    print(f"{self.left():.0f} s left: {name} was ready after {seconds} s", flush=True)
                    ready[name] = engine
                except Lost as error:
                    self.row(bench=bench, engine=name, error=str(error))
            yield ready
        finally:
            for engine in started.values():
                engine.end()

    def vllm(self, batches: Sequence[int], tandem: dict[str, Any] | None) -> tuple[str, dict[str, Any]]:
        return "vllm", {"model": self.model, "attention": self.attention, "batches": batches, "tandem": tandem}

    def kt(self, batches: Sequence[int], share: float, method: str) -> tuple[str, dict[str, Any]]:
        flags = ["--kt-method", method, "--kt-gpu-experts-ratio", str(share)]
        if self.attention:
            flags += ["--cuda-graph-bs", *map(str, batches)]
        return "kt", {"model": self.model, "flags": flags, "batches": batches}


def in_turns(run: Run, engines: dict[str, Engine], questions: Questions, turns: int) -> Samples:
    """questions: what is asked of which engine, by name. An engine that is lost is asked no more."""
    samples: Samples = defaultdict(list)
    lost = set[str]()
    for _ in range(turns):
        for point, (name, named) in questions.items():
            if name not in engines or name in lost or run.left() < 5:
                continue
            try:
                answer = engines[name].ask("decode", **named)
            except Lost as error:
                lost.add(name)
                answer = {"error": str(error)}
            samples[point].append(answer)
    return samples


def median_rate(samples: Sequence[dict[str, Any]]) -> float:
    rates = [each["tok_s"] for each in samples if "tok_s" in each]
    return statistics.median(rates) if rates else 0.0


def compared(samples: Samples, point: Point, other: Point) -> dict[str, Any]:
    """Columns of `point` beside `other`: medians of turns, and the least and the largest ratio of a turn."""
    ours, theirs = samples[point], samples[other]
    pairs = [(a["tok_s"], b["tok_s"]) for a, b in zip(ours, theirs, strict=False) if "tok_s" in a and "tok_s" in b]
    ratios = sorted(a / b for a, b in pairs)
    columns = {
        "tok_s": round(median_rate(ours), 1), "tok_s_kt": round(median_rate(theirs), 1),
        "ratio": round(statistics.median(ratios), 3) if ratios else None,
        "spread": [round(ratios[0], 3), round(ratios[-1], 3)] if ratios else None,
        "cpu_experts": ours[-1].get("cpu_experts") if ours else None,
        "cpu_experts_kt": theirs[-1].get("cpu_experts") if theirs else None,
        "replayed": ours[-1].get("replayed") if ours else None,
    }  # fmt: skip
    errors = [each["error"] for each in [*ours, *theirs] if "error" in each]
    return columns | ({"error": errors[0]} if errors else {})


def plugin_group(run: Run, share: float, threads: Sequence[int | None]) -> None:
    """threads: of the plug-in, an engine for each; None: all cores."""
    options = {"kt_method": "INT4"} | ({"kt_gpu_experts_ratio": share} if share else {})
    names = {f"plugin-{share}-{count or 'all'}": count for count in threads}
    wishes = {
        name: run.vllm(FEW, options | ({"kt_cpuinfer": count} if count else {})) for name, count in names.items()
    }
    kt = f"kt-{share}"
    with run.engines("vllm_plugin", wishes | {kt: run.kt(FEW, share, "INT4")}) as engines:
        samples = in_turns(run, engines, plugin_questions(names, kt), run.asked.turns)
        handoffs = {name: handoff(engines[name]) for name in names if name in engines}
        for point in samples:
            if point[0] == kt:
                continue
            name, batch, graphs, cpu = point
            run.row(
                bench="vllm_plugin", graphs=graphs, gpu_share=share, batch=batch, threads=names[name], core_cpu=cpu,
                **compared(samples, point, (kt, batch)), **handoffs.get(name, {}), format="INT4",
                attention=run.attention,
            )  # fmt: skip
        best = max(names, key=lambda name: median_rate(samples[name, 1, "full", None]))
        run.threads = names[best]


def plugin_questions(names: dict[str, int | None], kt: str) -> Questions:
    """cpu: the core's thread of vLLM runs on the first one alone, as that of `kt serve`; None: where it likes to."""
    questions: Questions = {}
    for batch in FEW:
        ask = {"batch": batch, "steps": STEPS[batch]}
        questions[kt, batch] = kt, ask
        for name, count in names.items():
            for graphs in ("full", "piecewise"):
                questions[name, batch, graphs, None] = name, ask | {"graphs": graphs}
            if batch == 1 and count is None:
                questions[name, batch, "full", 0] = name, ask | {"graphs": "full", "cpu": 0}
    return questions


def handoff(engine: Engine) -> dict[str, Any]:
    """Columns: microseconds of a layer's hand-off, and CPU use while idle."""
    columns = dict[str, Any]()
    with suppress(Lost, psutil.Error):
        columns["idle_cpu_percent"] = round(engine.cpu_percent(2.0), 1)
        answer = engine.ask("handoff")
        columns |= {"handoff_us": round(answer["us"], 2)} if "us" in answer else {"handoff_error": answer["error"]}
    return columns


def alone_group(run: Run) -> None:
    """All experts on the GPU, at several batches."""
    kts = {f"kt-1-{method}": run.kt(MANY, 1.0, method) for method in ("INT4", "BF16")}
    first = {"vllm-alone": run.vllm(MANY, None), "kt-1-INT4": kts["kt-1-INT4"]}
    samples: Samples = defaultdict(list)
    for wishes in (first, {"kt-1-BF16": kts["kt-1-BF16"]}):  # bf16 of both does not fit
        if run.left() < 40:
            run.row(bench="vllm_alone", engine=", ".join(wishes), error="no time was left")
            continue
        with run.engines("vllm_alone", wishes) as engines:
            asked = {batch: {"batch": batch, "steps": STEPS[batch]} for batch in MANY}
            questions: Questions = {(name, batch): (name, asked[batch]) for batch in MANY for name in engines}
            samples |= in_turns(run, engines, questions, run.asked.turns)
        for name in wishes:
            alone_rows(run, samples, name)


def alone_rows(run: Run, samples: Samples, kt: str) -> None:
    """Writes the rows of one of Tandem's engines, beside vLLM's figures."""
    if not kt.startswith("kt-"):
        return
    for batch in MANY:
        measured = samples["vllm-alone", batch], samples[kt, batch]
        theirs, ours = map(median_rate, measured)
        errors = [each["error"] for samples_of in measured for each in samples_of if "error" in each]
        run.row(
            bench="vllm_alone", batch=batch, gpu_share=1.0, tok_s=round(theirs, 1), tok_s_kt=round(ours, 1),
            ratio=round(ours / theirs, 3) if theirs and ours else None, format="BF16", format_kt=kt.split("-")[-1],
            attention=run.attention, **({"error": errors[0]} if errors else {}),
        )  # fmt: skip


def find_attention(run: Run) -> None:
    """vLLM's fastest on this GPU, if it computes what it should."""
    engine = Engine("attention", "attention", {}, run.asked.logs)
    try:
        engine.answer(min(60.0, run.left()))
        answer = engine.ask("decode")
        run.attention = answer["backend"]
        run.row(bench="vllm_attention", **answer)
    except Lost as error:
        run.row(bench="vllm_attention", error=str(error))
    finally:
        engine.end()


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=330.0, help="of all; what does not fit is left out by name")
    parser.add_argument("--group", action="append", choices=["none", "half", "alone"], help="default: all, in order")
    parser.add_argument("--attention", help="vLLM's backend; default: FlashAttention 3 if it works, else Triton")
    parser.add_argument("--spare", type=int, default=1, help="cores that a second engine leaves to vLLM's own threads")
    parser.add_argument("--out", type=Path, default=Path("vllm_plugin.jsonl"))
    parser.add_argument("--logs", type=Path, default=Path("/tmp/vllm-logs"))
    parser.add_argument("--shape", type=json.loads, default={}, help="other keys of config.json, to try it out")
    return parser


def main() -> None:
    asked = arguments().parse_args()
    for folder in (asked.logs, asked.out.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), asked.layers, asked.shape)
        run = Run(asked, folder)
        if asked.attention is None:
            find_attention(run)
        else:
            run.attention = asked.attention
        for name in asked.group or ("none", "half", "alone"):
            try:
                group(run, name)
            except Exception:  # the other groups have their turn
                run.row(bench="vllm_plugin", group=name, error=traceback.format_exc()[-700:])


def group(run: Run, name: str) -> None:
    if run.left() < 60:
        run.row(bench="vllm_plugin", group=name, error="no time was left")
    elif name == "alone":
        alone_group(run)
    elif name == "half":
        plugin_group(run, 0.5, [run.threads])
    else:
        cores = len(os.sched_getaffinity(0))
        plugin_group(run, 0.0, [None, cores - run.asked.spare] if cores > 2 else [None])


def write_model(folder: Path, layers: int, more: dict[str, Any]) -> None:
    """A folder without weights for both engines."""
    sys.path.append(str(ROOT / "src"))
    from tandem.bench.gaps.made_up import write_folder

    write_folder(folder, "qwen3-30b-a3b", layers)
    (folder / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": layers} | more))


if __name__ == "__main__":
    main()
