"""How fast a checkpoint is loaded, beside how fast its files can be read at all.

    PYTHONPATH=src python benchmarks/load.py /dev/shm/load --layers 48
    PYTHONPATH=src python benchmarks/load.py /dev/shm/load --layers 16 --packed-cache
    PYTHONPATH=src python benchmarks/load.py /dev/shm/load --layers 16 --gpu-experts-ratio 0.5

Writes a random Qwen3-30B-A3B (bf16, `--layers` of its 48) into the directory, reads its files with as many threads as
loading uses, loads it in a process of its own, and removes everything. Two plain reads are measured: into one small
buffer per thread (`read`, which touches each byte once), and into memory of the files' size that is new to the process
(`read_into_memory`: what a loader must do at least). Memory's speed may change within seconds, so both are measured
before and after every load, which is compared with the mean of those two (`of_read`, `of_read_into_memory`); `busy` is
the processor time of the load as a share of its threads' time. With --packed-cache the model is loaded once to write
the packed file, whose bytes are what is read from then on, and `--repeat` times from it. Nothing is dropped from the
page cache, so with a directory on a disk the files come from memory too, if they fit. In a virtual machine memory that
the guest has not used yet costs several times as much as clearing it: so one of each read comes before those that
count; `--again N` loads N times more in the same process (`seconds_again`). No GPU is used
unless --gpu-experts-ratio says which share of the experts to put there; CUDA has started and Triton is imported before
the time is taken, which takes as long as loading a small model.
`--map-experts never` packs experts that could be used in the checkpoint's pages, as happens on a disk.
`--profile` loads once more, under Python's profiler, and prints where the main thread was. What the parts of loading
cost on a machine (reading, new memory, page faults, checksums) is measured by benchmarks/probes/loading.cc.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import mmap
import os
import platform
import pstats
import resource
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

CONFIG = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "intermediate_size": 6144, "norm_topk_prob": True, "vocab_size": 151936,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu",
    "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
CHUNK = 4 << 20
Shapes = dict[str, tuple[int, ...]]


def layer_shapes(index: int) -> Shapes:
    h, w, heads, kv, d = 2048, 768, 32, 4, 128
    p = f"model.layers.{index}."
    shapes: Shapes = {p + n + ".weight": (h,) for n in ("input_layernorm", "post_attention_layernorm")}
    a = p + "self_attn."
    shapes |= {
        a + "q_proj.weight": (heads * d, h),
        a + "k_proj.weight": (kv * d, h),
        a + "v_proj.weight": (kv * d, h),
    }
    shapes |= {a + "o_proj.weight": (h, heads * d), a + "q_norm.weight": (d,), a + "k_norm.weight": (d,)}
    shapes[p + "mlp.gate.weight"] = (128, h)
    for e in range(128):
        x = f"{p}mlp.experts.{e}."
        shapes |= {
            x + "gate_proj.weight": (w, h),
            x + "up_proj.weight": (w, h),
            x + "down_proj.weight": (h, w),
        }
    return shapes


def write_model(path: Path, layers: int, threads: int) -> None:
    """One shard per layer and one for the rest, written in parallel."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    rest: Shapes = {f"{n}.weight": (151936, 2048) for n in ("model.embed_tokens", "lm_head")}
    rest["model.norm.weight"] = (2048,)
    noise = (torch.randn(32 << 20) * 0.02).bfloat16().view(torch.uint8).numpy().data
    with ThreadPoolExecutor(threads) as pool:
        jobs = [
            pool.submit(write_shard, path / f"layer-{i:03}.safetensors", layer_shapes(i), noise)
            for i in range(layers)
        ]
        jobs.append(pool.submit(write_shard, path / "rest.safetensors", rest, noise))
        for job in jobs:
            job.result()


def write_shard(file: Path, shapes: Shapes, noise: memoryview) -> None:
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb", buffering=0) as out:
        out.write(struct.pack("<Q", len(text)) + text)
        while end:
            end -= out.write(noise[: min(end, len(noise))])


def chunks(files: list[Path]) -> Iterator[tuple[int, int, int]]:
    """(descriptor, offset, place in the whole) of every CHUNK of the files."""
    place = 0
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        for offset in range(0, file.stat().st_size, CHUNK):
            yield descriptor, offset, place
            place += CHUNK


def read_seconds(files: list[Path], threads: int, memory: mmap.mmap | None = None) -> float:
    """Reads everything once: into `memory`, or into a small buffer of each thread's own."""
    work, lock = list(chunks(files)), threading.Lock()
    todo = iter(work)

    def run() -> None:
        own = None if memory is not None else mmap.mmap(-1, CHUNK)
        whole = memoryview(memory if memory is not None else own)
        while True:
            with lock:
                job = next(todo, None)
            if job is None:
                return
            descriptor, offset, place = job
            os.preadv(descriptor, [whole[place : place + CHUNK] if memory is not None else whole], offset)

    workers = [threading.Thread(target=run) for _ in range(threads)]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - start
    for descriptor in {d for d, _, _ in work}:
        os.close(descriptor)
    return seconds


def measure_reads(files: list[Path], threads: int, into_memory: bool) -> dict[str, float]:
    """GB/s of one plain read of each kind."""
    nbytes = sum(file.stat().st_size for file in files)
    rates = {"read": nbytes / 1e9 / read_seconds(files, threads)}
    if into_memory:
        size = nbytes + CHUNK * (len(files) + 1)
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        rates["read_into_memory"] = nbytes / 1e9 / read_seconds(files, threads, memory)
        memory.close()
    return rates


class Memory(threading.Thread):
    """Peaks of this process's own memory and of mapped file pages, every 20 ms; bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = {"RssAnon": 0, "RssFile": 0, "both": 0}
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(0.02):
            now = self.now()
            self.peak = {key: max(self.peak[key], now[key]) for key in now}

    @staticmethod
    def now() -> dict[str, int]:
        lines = Path("/proc/self/status").read_text().splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss")}
        own, mapped = sizes["RssAnon"], sizes["RssFile"] + sizes["RssShmem"]  # a tmpfs' files count as shared
        return {"RssAnon": own, "RssFile": mapped, "both": own + mapped}

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def spent() -> tuple[float, float, int]:
    """Use of this process: seconds of all threads in the kernel and outside of it, page faults."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_stime, usage.ru_utime, usage.ru_minflt


def print_profile(load: Callable[[], object], rows: int = 16) -> None:
    """Where the main thread is, which packs as worker 0."""
    profile = cProfile.Profile()
    profile.runcall(load)
    pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(rows)


def sides(options: argparse.Namespace) -> dict[str, Any]:
    """Where experts live, as flags."""
    if options.gpu_experts_ratio is None:
        return {"device": "cpu", "mem_fraction_static": 0.99}
    import tandem.engine.start.gpu_side  # noqa: F401

    torch.zeros(1, device="cuda").cpu()
    return {"kt_gpu_experts_ratio": options.gpu_experts_ratio, "max_total_tokens": 1024}


def load_once(model: str, cache: str | None, options: argparse.Namespace) -> None:
    """In a process of its own: loads as `kt serve` does and prints a line of JSON."""
    import gc

    from tandem.engine.start import loader
    from tandem.flags.engine_config import EngineConfig

    if not (
        Path(model) / "tokenizer.json"
    ).exists():  # a synthetic model has none, and it is not what is timed
        loader.Tokenizer.load = classmethod(lambda *_: None)  # type: ignore[method-assign,assignment]
    before, memory, marks = Memory.now(), Memory(), []
    memory.start()
    config = EngineConfig(
        model=model,
        context_length=256,
        packed_cache=cache,
        kt_method=options.kt_method,
        map_experts=options.map_experts,
        **sides(options),
    )
    used, start = spent(), time.perf_counter()
    parts = loader.load_parts(
        config, lambda what, done, _all: marks.append((time.perf_counter() - start, what, done))
    )
    seconds = time.perf_counter() - start
    used = tuple(now - then for now, then in zip(spent(), used, strict=True))
    memory.stop()
    held = [parts]
    del parts
    final, plan, repeated = Memory.now()["RssAnon"] - before["RssAnon"], held[0].plan, []
    for _ in range(options.again):
        held.clear()
        gc.collect()
        start = time.perf_counter()
        held.append(loader.load_parts(config))
        repeated.append(time.perf_counter() - start)
    if options.profile:
        held.clear()
        gc.collect()
        print_profile(lambda: loader.load_parts(config))
    layers = [t for t, what, _ in marks if what.startswith("loading")]
    print(json.dumps({
        "seconds": seconds, "seconds_again": repeated,
        "system_seconds": used[0], "user_seconds": used[1], "page_faults": used[2],
        "seconds_until_last_layer": layers[-1] if layers else None, "threads": len(plan.cpus),
        "tier": plan.tier, "experts_in_place": plan.experts_in_place,
        "peak_anonymous_gb": (memory.peak["RssAnon"] - before["RssAnon"]) / 1e9,
        "final_anonymous_gb": final / 1e9,
        "peak_mapped_file_gb": (memory.peak["RssFile"] - before["RssFile"]) / 1e9,
        "peak_both_gb": (memory.peak["both"] - before["both"]) / 1e9,
        "gpu_gb": torch.cuda.memory_allocated() / 1e9 if torch.cuda.is_initialized() else 0.0,
    }))  # fmt: skip


def load(model: Path, cache: Path | None, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, str(model), "--once", "--again", str(options.again)]
    command += ["--profile"] if options.profile else []
    command += ["--kt-method", options.kt_method] if options.kt_method else []
    command += ["--map-experts", options.map_experts]
    ratio = options.gpu_experts_ratio
    command += [] if ratio is None else ["--gpu-experts-ratio", str(ratio)]
    command += ["--cache-directory", str(cache)] if cache else []
    done = subprocess.run(command, capture_output=True, text=True)
    sys.stderr.write(done.stderr)
    if done.returncode:
        raise SystemExit(f"loading failed with {done.returncode}: {done.stdout}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_loads(
    files: list[Path], model: Path, cache: Path | None, options: argparse.Namespace
) -> dict[str, Any]:
    """Rates of `files`: their plain reads, and loads between those."""
    into_memory = cache is None
    measure_reads(files, options.threads, into_memory)  # pages that this machine has not used yet cost more
    gigabytes = sum(file.stat().st_size for file in files) / 1e9
    reads, loads = [measure_reads(files, options.threads, into_memory)], []
    for _ in range(options.repeat):
        found = load(model, cache, options)
        reads.append(measure_reads(files, options.threads, into_memory))
        row = {"gb_per_s": gigabytes / found["seconds"]} | found
        for kind in reads[-1]:
            row[f"of_{kind}"] = row["gb_per_s"] / ((reads[-2][kind] + reads[-1][kind]) / 2)
        row["busy"] = (row["system_seconds"] + row["user_seconds"]) / (row["threads"] * row["seconds"])
        loads.append(row)
        print(json.dumps(row), flush=True)
    rates = {f"{kind}_gb_per_s": [read[kind] for read in reads] for kind in reads[0]}
    return {"gigabytes": gigabytes, "files": len(files), **rates, "loads": loads}


def measure(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    model, cache = path / "model", path / "cache" if options.packed_cache else None
    start = time.perf_counter()
    write_model(model, options.layers, options.threads)
    print(f"written in {time.perf_counter() - start:.1f} s", flush=True)
    files = sorted(model.glob("*.safetensors"))
    row: dict[str, Any] = {"layers": options.layers, "gpu_experts_ratio": options.gpu_experts_ratio}
    row["threads"] = options.threads
    if cache is None:
        return row | {"checkpoint": measure_loads(files, model, None, options)}
    written = load(model, cache, options)
    print(json.dumps({"kind": "load_and_write_cache", **written}), flush=True)
    plain = [measure_reads(files, options.threads, False)["read"] for _ in range(2)]
    found = measure_loads(sorted(cache.glob("*.packed")), model, cache, options)
    return row | {"load_and_write_cache": written, "checkpoint_read_gb_per_s": plain, "packed_cache": found}


def machine() -> dict[str, Any]:
    cpu = next(
        (
            x.split(":")[1].strip()
            for x in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in x
        ),
        "",
    )
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {"cpu": cpu, "cpus": os.cpu_count(), "kernel": platform.release(), "torch": torch.__version__,
            "huge_pages": huge.read_text().strip() if huge.exists() else ""}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "directory", type=Path, help="a directory that does not exist yet, e.g. below /dev/shm"
    )
    parser.add_argument("--layers", type=int, default=48, help="1.26 GB each, and 1.24 GB for the rest")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the plain reads")
    parser.add_argument("--repeat", type=int, default=2, help="loads, each in a process of its own")
    parser.add_argument("--again", type=int, default=0, help="further loads in each process")
    parser.add_argument("--packed-cache", action="store_true")
    parser.add_argument("--kt-method", help="rounds experts while loading: INT8 or INT4")
    parser.add_argument("--map-experts", default="auto", choices=("auto", "always", "never"))
    parser.add_argument("--gpu-experts-ratio", type=float, help="share of the experts on the GPU, 0 to 1")
    parser.add_argument("--profile", action="store_true", help="one more load in each process, profiled")
    parser.add_argument("--json", type=Path, help="where the result is written")
    parser.add_argument("--commit", default="", help="noted in the result")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cache-directory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        return load_once(str(options.directory), options.cache_directory, options)
    try:
        row = measure(options.directory, options)
    finally:
        shutil.rmtree(options.directory, ignore_errors=True)
    result = {"command": " ".join(sys.argv), "commit": options.commit, "machine": machine(), **row}
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    print_summary(row)


def print_summary(row: dict[str, Any]) -> None:
    """A line for each load beside the two reads around it."""
    for what in ("checkpoint", "packed_cache"):
        part = row.get(what, {"loads": []})
        for index, one in enumerate(part["loads"]):
            text = f"{what} {part['gigabytes']:.1f} GB: {one['gb_per_s']:.1f} GB/s, busy {one['busy']:.2f}"
            for kind in (k for k in ("read", "read_into_memory") if f"of_{k}" in one):
                around = part[f"{kind}_gb_per_s"][index : index + 2]
                text += f"; {one[f'of_{kind}']:.2f} of {kind} ({around[0]:.1f}, {around[1]:.1f})"
            print(text)


if __name__ == "__main__":
    main()
