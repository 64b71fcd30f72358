"""Which model types run, and how: a table that `scripts/model_table.py` made by running each of them."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

TABLE_FILE = Path(__file__).parents[1] / "data" / "models.json"

How = Literal["native", "paged", "alone", "refused"]

PUBLISHED: dict[str, tuple[str, ...]] = {
    "afmoe": ("Trinity-Mini", "Trinity-Nano"),
    "bailing_hybrid": ("Ling-3.0-flash", "Ling-3.0-tiny"),
    "bailing_moe": ("Ling-lite", "Ling-lite-1.5", "Ling-plus", "Ling-Coder-lite"),
    "bailing_moe_v2": ("Ling-flash-2.0", "Ring-flash-2.0", "Ling-mini-2.0", "Ring-mini-2.0", "Ling-1T", "Ring-1T"),
    "cohere2_moe": ("Command-A-Plus",),
    "dbrx": ("DBRX",),
    "deepseek_v2": ("DeepSeek-V2", "DeepSeek-V2-Lite", "DeepSeek-Coder-V2"),
    "deepseek_v3": ("DeepSeek-V3", "DeepSeek-V3.1", "DeepSeek-R1", "Moonlight-16B-A3B", "Kimi-VL-A3B"),
    "deepseek_v32": ("DeepSeek-V3.2",),
    "deepseek_v4": ("DeepSeek-V4-Flash", "DeepSeek-V4-Pro"),
    "dots1": ("dots.llm1",),
    "ernie4_5_moe": ("ERNIE-4.5-21B-A3B", "ERNIE-4.5-300B-A47B"),
    "ernie4_5_vl_moe": ("ERNIE-4.5-VL-28B-A3B", "ERNIE-4.5-VL-424B-A47B"),
    "exaone_moe": ("K-EXAONE-236B",),
    "flex_olmo": ("FlexOlmo-7x7B",),
    "gemma4": ("Gemma-4-26B-A4B",),
    "glm4_moe": ("GLM-4.5", "GLM-4.5-Air", "GLM-4.6", "GLM-4.7"),
    "glm4_moe_lite": ("GLM-4.7-Flash",),
    "glm4v_moe": ("GLM-4.5V", "GLM-4.6V"),
    "glm5_next": ("GLM-5.3-Flash",),
    "glm_moe_dsa": ("GLM-5", "GLM-5.1", "GLM-5.2", "GLM-5.3"),
    "gpt_oss": ("gpt-oss-20b", "gpt-oss-120b"),
    "granitemoe": ("Granite-3.1-3B-A800M", "Granite-3.1-1B-A400M", "Granite-3.0-3B-A800M", "Granite-3.0-1B-A400M"),
    "granitemoehybrid": ("Granite-4.0-H-Small", "Granite-4.0-H-Tiny"),
    "hunyuan_v1_moe": ("Hunyuan-A13B",),
    "hy_v3": ("Hy3",),
    "hy_v4": ("Hy4",),
    "jamba": ("Jamba",),
    "jetmoe": ("JetMoE-8B",),
    "kimi_k2": ("Kimi-K2",),
    "kimi_k25": ("Kimi-K2.5", "Kimi-K2.6"),
    "kimi_linear": ("Kimi-Linear-48B-A3B",),
    "laguna": ("Laguna-S-2.1",),
    "lfm2_moe": ("LFM2-8B-A1B", "LFM2-24B-A2B"),
    "llama4": ("Llama-4-Scout", "Llama-4-Maverick"),
    "longcat_flash": ("LongCat-Flash",),
    "mimo_v2_flash": ("MiMo-V2-Flash",),
    "minimax_m2": ("MiniMax-M2", "MiniMax-M2.1", "MiniMax-M2.5", "MiniMax-M2.7"),
    "minimax_m3_vl": ("MiniMax-M3",),
    "mistral4": ("Mistral-Small-4",),
    "mistral_large4": ("Mistral-Large-4",),
    "mixtral": ("Mixtral-8x7B", "Mixtral-8x22B"),
    "nemotron_h": ("Nemotron-3-Nano", "Nemotron-3-Super"),
    "olmoe": ("OLMoE-1B-7B",),
    "phimoe": ("Phi-3.5-MoE", "Phi-mini-MoE", "Phi-tiny-MoE"),
    "qwen2_moe": ("Qwen2-57B-A14B", "Qwen1.5-MoE-A2.7B"),
    "qwen3_5_moe": ("Qwen3.5-35B-A3B", "Qwen3.5-122B-A10B", "Qwen3.5-397B-A17B", "Qwen3.6-35B-A3B"),
    "qwen3_moe": ("Qwen3-30B-A3B", "Qwen3-235B-A22B", "Qwen3-Coder-30B-A3B", "Qwen3-Coder-480B-A35B"),
    "qwen3_omni_moe": ("Qwen3-Omni-30B-A3B",),
    "qwen3_next": ("Qwen3-Next-80B-A3B", "Qwen3-Coder-Next"),
    "qwen3_vl_moe": ("Qwen3-VL-30B-A3B", "Qwen3-VL-235B-A22B"),
    "qwen4_exp": ("Qwen3.8-Flash-Next",),
    "solar_open": ("Solar-Open-100B",),
    "step3p5": ("Step-3.5-Flash",),
    "step3p7": ("Step-3.7-Flash",),
}
"""By model type, names under which such models are published."""


@dataclass(frozen=True, slots=True)
class Runs:
    """how: "native", by code of ours; by Transformers' modules "paged", or "alone", one sequence at a time; or
    "refused". why: of the last two. gpu: why a native one does not run beside a GPU."""

    model_type: str
    how: How
    why: str = ""
    gpu: str = ""

    def as_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value}


@dataclass(frozen=True, slots=True)
class ModelTypeTable:
    """transformers: the version whose types these are."""

    transformers: str
    rows: tuple[Runs, ...]

    def row(self, model_type: str) -> Runs | None:
        return next((row for row in self.rows if row.model_type == model_type), None)


def read_table() -> ModelTypeTable:
    table = json.loads(TABLE_FILE.read_text())
    return ModelTypeTable(table["transformers"], tuple(Runs(**row) for row in table["types"]))


_OTHERS = ("DeepSeek-R1-Distill", "DeepSeek-R1-0528-Qwen3", "GLM-4.6V-Flash")
"""Published names that begin as another model's does: dense ones."""


def type_of_name(name: str) -> str | None:
    """The model type of "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", by the longest known name in it. None: not known."""
    parts = _words(name)
    matches = {
        len(words): model_type
        for model_type, names in (PUBLISHED | {None: _OTHERS}).items()
        for words in map(_words, names)
        if any(parts[at : at + len(words)] == words for at in range(len(parts)))
    }
    return matches[max(matches)] if matches else None


def rows_called(table: ModelTypeTable, name: str) -> list[Runs]:
    """Those whose type, or a name published of it, begins as `name` does: "glm", "Qwen3"."""
    runs = _runs(name)

    def begins(row: Runs) -> bool:
        return any(_begins(_runs(each), runs) for each in (row.model_type, *PUBLISHED.get(row.model_type, ())))

    return [row for row in table.rows if runs and begins(row)]


def _begins(whole: list[str], part: list[str]) -> bool:
    """A number must be whole: "Qwen2.5-7B" is no beginning of "Qwen2-57B"."""
    *first, last = part
    if len(whole) < len(part) or whole[: len(first)] != first:
        return False
    met = whole[len(first)]
    return met == last or (not last.isdigit() and met.startswith(last))


def _runs(name: str) -> list[str]:
    """Letters and numbers in turn, whatever stands between letters: "gpt-oss-20b" → gptoss, 20, b."""
    return re.findall(r"\d+|[a-z]+", re.sub(r"(?<=[a-z])[^a-z0-9]+(?=[a-z])", "", name.lower()))


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())
