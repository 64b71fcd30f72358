"""The flags: names, aliases, values, availability, what is said about flags that change nothing."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from tandem.errors import ConfigError
from tandem.flags.engine_config import FLAGS, FORMER, EngineConfig
from tandem.flags.foreign_flags import FOREIGN

# The names that users already type; a copy on purpose, so that a renamed flag fails here.
PUBLIC_FLAGS = """
--model --model-path --served-model-name --host --port --api-key --tensor-parallel-size --tp --context-length
--max-total-tokens --max-running-requests --chunked-prefill-size --max-prefill-tokens --mem-fraction-static
--attention-backend --enable-mixed-chunk --disable-radix-cache --cuda-graph-bs --cuda-graph-max-bs --disable-cuda-graph
--watchdog-timeout --skip-server-warmup --trust-remote-code --disable-shared-experts-fusion --reasoning-parser
--tool-call-parser --speculative-algorithm --speculative-num-steps --speculative-eagle-topk
--speculative-num-draft-tokens --speculative-moe-runner-backend --init-expert-location
--expert-distribution-recorder-mode --nnodes --node-rank --dist-init-addr --kt-amx-weight-path --kt-amx-method
--kt-weight-path --kt-method --kt-cpuinfer --kt-threadpool-count --kt-numa-nodes --kt-num-gpu-experts
--kt-gpu-experts-ratio --kt-expert-placement-strategy --kt-enable-dynamic-expert-update
--kt-gpu-prefill-token-threshold --kt-max-deferred-experts-per-token --record-kt-gpu-expert-distribution
--dtype --page-size --kernel-tier
""".split()


@pytest.mark.parametrize("spelling", PUBLIC_FLAGS)
def test_every_public_flag_is_declared_once(spelling: str) -> None:
    assert [f.name for f in FLAGS if spelling in f.spellings] != []
    assert sum(f.spellings.count(spelling) for f in FLAGS) == 1


def test_every_field_is_a_flag_with_help() -> None:
    names = {f.name for f in dataclasses.fields(EngineConfig)} - {"explicit", "former", "way_chosen"}
    assert names == {f.name for f in FLAGS}
    assert all(f.help.endswith(".") and len(f.help) < 70 for f in FLAGS)


def test_positional_model_and_flag_agree() -> None:
    assert EngineConfig.from_args(["demo"]).model == "demo"
    assert EngineConfig.from_args(["--model-path", "demo", "--port", "1"]).model == "demo"
    assert EngineConfig.from_args(["--port=1", "demo", "--tp", "1"]).model == "demo"
    with pytest.raises(ConfigError, match="two models"):
        EngineConfig.from_args(["demo", "--model", "other"])
    with pytest.raises(ConfigError, match="kt serve demo"):
        EngineConfig.from_args([])


def test_values_arrive_typed() -> None:
    config = EngineConfig.from_args(
        ["demo", "--kt-cpuinfer", "3", "--mem-fraction-static", "0.5", "--kt-numa-nodes", "0", "1",
         "--disable-radix-cache", "--kt-amx-method", "amxint4"]
    )  # fmt: skip
    assert (config.kt_cpuinfer, config.mem_fraction_static) == (3, 0.5)
    assert config.kt_numa_nodes == (0, 1)
    assert config.disable_radix_cache is True
    assert config.kt_method == "AMXINT4"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--port", "x"], "--port.*'x'"),
        (["--port", "70000"], "--port is 70000; it must be from 0 to 65535"),
        (["--mem-fraction-static", "nan"], "--mem-fraction-static is nan"),
        (["--mem-fraction-static", "1.5"], "from 0.01 to 0.99"),
        (["--dtype", "float8"], "one of auto, bfloat16, float32"),
        (["--kt-cpuinfer", "0"], "at least 1"),
        (["--watchdog-timeout", "1"], "at least 5"),  # an idle engine says something every second
        (["--chunked-prefill-size", "0"], "-1 for whole prompts"),
        (["--port"], "--port.*expected one argument"),
        (
            ["--kt-numa-nodes", "0", "1", "demo"],
            "--kt-numa-nodes: 'demo' is not a whole number.*put MODEL first",
        ),
        (["--kt-cpuinfr", "3"], "unknown flag --kt-cpuinfr; the nearest known one is --kt-cpuinfer"),
        (["--portt=3"], "unknown flag --portt; the nearest known one is --port"),
        (["--qqqq"], r"unknown flag --qqqq \(kt serve --help-all"),
        (
            ["--quantization", "fp8"],
            "unknown flag --quantization: how weights are stored is read from the checkpoint",
        ),
        (["--load-format", "auto"], "unknown flag --load-format: how weights are stored"),
        (["--config", "x.yaml"], "unknown flag --config: flags are given on the command line"),
        (["extra"], "unexpected argument 'extra'"),
    ],
)
def test_wrong_values_name_the_flag(argv: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineConfig.from_args(["demo", *argv])


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--model other", "--model is given twice, as demo and as other: give one"),
        ("--port 1 --port=2 --port 1", "--port is given twice, as 1 and as 2"),
        ("--tp 2 --tensor-parallel-size 3", "--tensor-parallel-size is given twice, as 2 and as 3"),
        ("--kt-numa-nodes 0 1 --kt-numa-nodes 1", "as 0 1 and as 1: give one --kt-numa-nodes, with all"),
        ("--spared-multiprocessors 8 --prefill-reserved-sms 16", "--prefill-reserved-sms is given twice, as 8 and as"),
        ("--api-key s3cret --api-key t0ken", "--api-key is given twice, with two values: give one"),
        ("--portt 3 --port 1 --port 2", "--port is given twice, as 1 and as 2.*\n.*--portt"),
    ],
)
def test_two_values_of_one_flag_are_refused(argv: str, says: str) -> None:
    """argparse would take the last one."""
    with pytest.raises(ConfigError, match=says) as refused:
        EngineConfig.from_args(["--model", "demo", *argv.split()])
    assert "s3cret" not in str(refused.value)


def test_the_same_value_may_be_given_again() -> None:
    """Command lines are put together by pasting."""
    line = "demo --model demo --port 1 --port=1 --tp 2 --tp-size 2 --kt-numa-nodes 0 1 --kt-numa-nodes 0 1 "
    config = EngineConfig.from_args((line + "--disable-radix-cache --disable-radix-cache").split())
    assert (config.port, config.tensor_parallel_size, config.kt_numa_nodes) == (1, 2, (0, 1))


def test_everything_wrong_with_a_line_is_said_at_once() -> None:
    line = "--nnodes 2 --port x --speculative-eagle-topk 2 --quantization fp8 --portt 3 --dtype float8 --page-size 0"
    with pytest.raises(ConfigError) as refused:
        EngineConfig.from_args(["demo", *line.split()])
    said = [
        reason.split()[0 if reason.startswith("--") else 2].rstrip(":;") for reason in refused.value.reasons
    ]
    assert sorted(said) == sorted(
        ["--nnodes", "--port", "--speculative-eagle-topk", "--quantization", "--portt", "--dtype",
         "--page-size"]
    )  # fmt: skip
    assert str(refused.value).splitlines()[0] == "7 things stand in the way:"


def test_a_hint_never_names_a_flag_of_another_meaning() -> None:
    """Nearest by letters, `--quantization` was `--kt-int8-activations`, which is lossy."""
    for name in FOREIGN:
        with pytest.raises(ConfigError) as refused:
            EngineConfig.from_args(["demo", name, "1"])
        assert "nearest" not in str(refused.value)
        assert not [f for f in FLAGS if name in f.spellings]


def test_fields_can_be_left_out() -> None:
    config = EngineConfig.from_args(["demo", "--kt-cpuinfer", "3", "--port", "8"]).without(
        ("kt_cpuinfer", "model")
    )
    assert (config.model, config.kt_cpuinfer, config.port, config.explicit) == (
        "demo",
        None,
        8,
        {"model", "port"},
    )


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--tp", "0"], "--tensor-parallel-size is 0; it must be at least 1"),
        (["--speculative-moe-runner-backend", "triton"], "not available yet. Use auto"),
        (["--nnodes", "2"], "Use 1"),
    ],
)
def test_missing_features_are_refused_with_what_works(argv: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineConfig.from_args(["demo", *argv])


@pytest.mark.parametrize(
    "argv",
    [
        ["--trust-remote-code"], ["--enable-mixed-chunk"], ["--nnodes", "1"],
        ["--dist-init-addr", "a:1"],
    ],
)  # fmt: skip
def test_flags_that_change_nothing_say_so(argv: list[str]) -> None:
    (line,) = EngineConfig.from_args(["demo", *argv]).notices()
    assert re.match(r"--[a-z-]+.* changes nothing: ", line)


def test_flags_that_matter_and_flags_left_out_say_nothing() -> None:
    assert EngineConfig.from_args(["demo", "--kt-method", "INT4", "--port", "30000", "--tp", "1"]).notices() == []


@pytest.mark.parametrize("words", [["--spared-multiprocessors", "8"], ["--spared-multiprocessors=8"]])
def test_an_older_spelling_works_and_says_the_new_one(words: list[str]) -> None:
    notice = "--spared-multiprocessors is now --prefill-reserved-sms; the next release no longer takes the old name"
    typed = EngineConfig.from_args(["demo", *words])
    keyword = EngineConfig.from_keywords("demo", spared_multiprocessors=8)
    assert [(c.prefill_reserved_sms, c.notices()) for c in (typed, keyword)] == [(8, [notice])] * 2
    assert EngineConfig.from_args(["demo", "--prefill-reserved-sms", "8"]).notices() == []
    assert set(FORMER.values()) <= {f.name for f in FLAGS} and not {k for f in FLAGS for k in f.keywords} & set(FORMER)
    with pytest.raises(ConfigError, match="is given twice"):
        EngineConfig.from_keywords("demo", spared_multiprocessors=8, prefill_reserved_sms=8)


def test_python_keywords() -> None:
    config = EngineConfig.from_keywords("demo", tp=1, kt_amx_method="INT8", context_length=64)
    assert (config.tensor_parallel_size, config.kt_method, config.context_length) == (1, "INT8", 64)
    assert config.notices() == []
    with pytest.raises(
        ConfigError, match="unknown keyword contxt_length; the nearest known one is context_length"
    ):
        EngineConfig.from_keywords("demo", contxt_length=3)
    with pytest.raises(ConfigError, match="given twice"):
        EngineConfig.from_keywords("demo", tp=1, tensor_parallel_size=1)
    with pytest.raises(ConfigError, match="--port takes a whole number, not '1'"):
        EngineConfig.from_keywords("demo", port="1")
    with pytest.raises(ConfigError, match="not available yet"):
        EngineConfig(model="demo", nnodes=2)


def test_every_flag_that_is_said_to_work_is_read_somewhere() -> None:
    source = Path(__file__).parents[2] / "src" / "tandem"
    text = "\n".join(p.read_text() for p in source.rglob("*.py") if p.name != "engine_config.py")
    works = [f.name for f in FLAGS if f.idle is None and f.later is None]
    assert [name for name in works if not re.search(rf"config\.{name}\b", text)] == []


def test_a_flag_that_is_said_to_change_nothing_is_read_nowhere() -> None:
    source = Path(__file__).parents[2] / "src" / "tandem"
    text = "\n".join(p.read_text() for p in source.rglob("*.py") if p.parent.name != "config")
    idle = [f.name for f in FLAGS if f.idle is not None]
    assert len(idle) > 5
    assert [name for name in idle if re.search(rf"config\.{name}\b", text)] == []


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig(model="demo").port = 1  # type: ignore[misc]


def test_environment_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = EngineConfig.from_args(["demo"])
    for name in ("SGLANG_PORT", "AMX_METHOD", "FLASHINFER_CUDA_ARCH_LIST", "PYTORCH_CUDA_ALLOC_CONF", "PORT"):
        monkeypatch.setenv(name, "INT4")
    assert EngineConfig.from_args(["demo"]) == plain
