"""Steps of made-up routing and tiny engines whose choice of experts is recorded."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tandem.engine.engine import Engine
from tandem.engine.protocol import GenerateRequest, SamplingSettings
from tandem.engine.start.loader import load_parts
from tandem.engine.start.parts import EngineParts
from tandem.experts.usage.expert_usage import ExpertUsage
from tandem.experts.usage.recorder import ExpertRecorder, RecordedRows, RecorderOptions
from tandem.experts.usage.usage_file import UsageRecord, read_usage
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.reference import TorchOps
from tandem.mechanisms.router.shape import Router

LAYERS, EXPERTS, TOP_K, MOST_ROWS = 3, 7, 2, 8


class Steps:
    """Steps of made-up routing through real counts."""

    def __init__(self, directory: Path, **options) -> None:
        self.options = RecorderOptions(directory, **options)
        on_gpu = torch.zeros(LAYERS, EXPERTS, dtype=torch.bool)
        on_gpu[:, 2] = True
        self.usage = ExpertUsage(LAYERS, EXPERTS, gpu_experts=on_gpu, chosen=(MOST_ROWS, TOP_K))
        self.recorder = ExpertRecorder(self.usage, (0, 2, 5), self.options, "made-up")
        self._generator = torch.Generator().manual_seed(4)

    def run(self, *rows: RecordedRows, fail: bool = False) -> Tensor:
        """ids [rows, layers, top_k]."""
        count = sum(r.length for r in rows)
        self.usage.begin(count)
        ids = []
        for layer in range(LAYERS):
            logits = torch.randn(count, EXPERTS, generator=self._generator)
            routing = TorchOps().bound(Router(EXPERTS, TOP_K))(logits, None, 1, self.usage.tally(layer))
            ids.append(routing.ids[:, :TOP_K])
        if fail:
            self.recorder.after_failure()
        else:
            self.recorder.after_step(rows)
        return torch.stack(ids, 1)

    def dumped(self) -> UsageRecord:
        return read_usage(self.recorder.dump().result(120))


def tiny_engine(path: Path, directory: Path, **flags) -> Engine:
    return Engine.from_parts(tiny_parts(path, directory, **flags))


def tiny_parts(path: Path, directory: Path, **flags) -> EngineParts:
    flags = {
        "dtype": "float32", "kt_cpuinfer": 2, "max_total_tokens": 256, "chunked_prefill_size": 8, "device": "cpu",
        "expert_distribution_recorder_dir": str(directory),
    } | flags  # fmt: skip
    return load_parts(EngineConfig.from_keywords(str(path), **flags))


def generate(engine: Engine, *prompts: list[int], answer: int = 6) -> None:
    params = SamplingSettings(temperature=0.0, max_tokens=answer, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add(GenerateRequest(id=str(i), prompt_ids=prompt, sampling=params))
    while engine.has_work():
        engine.step()
