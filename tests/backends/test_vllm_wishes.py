"""What stands in vLLM's way of Tandem's experts, by its own configuration; vLLM need not be installed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tandem.backends.vllm.options import check, engine_config, wishes_of
from tandem.errors import ConfigError


def config(wishes: object = None, **more: Any) -> SimpleNamespace:
    parallel = {"enable_expert_parallel": False, "enable_eplb": False, "data_parallel_size": 1}
    model = {"model": "ORG/NAME", "revision": None, "dtype": "torch.bfloat16"}
    given = {} if wishes is None else {"tandem": wishes}
    return SimpleNamespace(
        additional_config=given, lora_config=more.pop("lora_config", None),
        parallel_config=SimpleNamespace(**parallel | {key: more[key] for key in more if key not in MODEL}),
        model_config=SimpleNamespace(**model | {key: more[key] for key in more if key in MODEL}),
    )  # fmt: skip


MODEL = ("model", "revision", "dtype", "enable_sleep_mode")


def test_without_the_option_nothing_is_joined() -> None:
    assert wishes_of(config()) is None
    assert wishes_of(config(False)) is None
    assert wishes_of(SimpleNamespace(additional_config=object())) is None  # a plug-in's own


def test_options_are_those_of_serve() -> None:
    made = engine_config(config({"kt-method": "INT4", "kt_cpuinfer": 8, "kt_numa_nodes": [0]}, revision="v2"))
    assert (made.model, made.kt_method, made.kt_cpuinfer, made.kt_numa_nodes) == ("ORG/NAME@v2", "INT4", 8, (0,))
    assert engine_config(config(True)).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"enable_expert_parallel": True}, "--enable-expert-parallel"),
        ({"enable_eplb": True}, "--enable-eplb"),
        ({"data_parallel_size": 2}, "--data-parallel-size"),
        ({"prefill_context_parallel_size": 2}, "--prefill-context-parallel-size"),
        ({"enable_dbo": True}, "--enable-dbo"),
        ({"enable_sleep_mode": True}, "--enable-sleep-mode"),
        ({"lora_config": object()}, "--enable-lora"),
        ({"dtype": "torch.float16"}, "take --dtype bfloat16"),
    ],
)
def test_what_cannot_be_together_is_said(changed: dict[str, Any], said: str) -> None:
    check(config({}))
    with pytest.raises(ConfigError, match=said):
        check(config({}, **changed))


def test_all_reasons_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as told:
        check(config({"kt_metod": 1}, enable_eplb=True, data_parallel_size=2))
    assert len(told.value.reasons) == 3


def test_a_wish_is_a_table() -> None:
    with pytest.raises(ConfigError, match="is a table of options"):
        wishes_of(config("INT4"))
