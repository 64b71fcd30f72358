"""The command lines of KTransformers' and SGLang's tutorials, on small stand-ins of the models they name.

Each starts on a machine without a GPU, with notes; or all that does not work yet is said at once. What is refused here
is what is not built yet: whoever builds it takes it out of the table.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quantised_models import experts_only, save_quantised
from stream_draft_models import stream_drafted
from tandem import LLM, SamplingParams
from tandem.cli.app import app
from tandem.cli.serve import possible_config
from tandem.engine.protocol import SpeculationStats
from tandem.engine.start.planning import plan_of, planned
from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.this_machine import these_cpus
from tandem.server import engine_process
from tiny import save_tiny, settings

SIZES = settings(
    hidden_size=128, num_hidden_layers=2, moe_intermediate_size=64, intermediate_size=96, vocab_size=64,
    bos_token_id=1, eos_token_id=2, pad_token_id=2,
)  # fmt: skip

FIRST_MODEL = """
  --host 0.0.0.0 --port 5000 --model {deepseek} --kt-amx-weight-path {int8}
  --kt-cpuinfer 128 --kt-threadpool-count 4 --kt-num-gpu-experts 0 --kt-amx-method AMXINT8
  --attention-backend flashinfer --trust-remote-code --mem-fraction-static 0.98
  --chunked-prefill-size 4096 --max-running-requests 1 --context-length 131072 --max-total-tokens 131072
  --served-model-name DeepSeek-V3-0324 --enable-mixed-chunk --disable-shared-experts-fusion
"""
SCHEDULING = "--model {qwen} --kt-num-gpu-experts 8 --kt-expert-placement-strategy"
FLASH = """
  --host 0.0.0.0 --port 30000 --model {flash} --kt-weight-path {flash} --kt-method MXFP4
  --kt-num-gpu-experts 10 --kt-cpuinfer 60 --kt-threadpool-count 2 --kt-gpu-prefill-token-threshold 4096
  --kt-enable-dynamic-expert-update --tensor-parallel-size 1 --context-length 16384 --attention-backend flashinfer
  --mem-fraction-static 0.85 --chunked-prefill-size 2048 --max-prefill-tokens 2048 --max-running-requests 2
  --watchdog-timeout 1200 --disable-shared-experts-fusion --trust-remote-code
  --cuda-graph-bs 1 --cuda-graph-max-bs 1 --disable-radix-cache --skip-server-warmup
"""
SPECULATION = """
  --speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1
  --speculative-num-draft-tokens 4 --speculative-moe-runner-backend auto
"""
THRESHOLD = "--kt-gpu-prefill-token-threshold"

# line: (flags that are refused, flags that a note is about)
LINES: dict[str, tuple[set[str], set[str]]] = {
    FIRST_MODEL: (
        set(),
        {"--trust-remote-code", "--enable-mixed-chunk", "--attention-backend", "--kt-num-gpu-experts"},
    ),
    FIRST_MODEL.replace("amx-", ""): (set(), {"--attention-backend"}),
    f"{SCHEDULING} uniform": (set(), {"--kt-num-gpu-experts"}),
    f"{SCHEDULING} frequency --init-expert-location {{stats}}": (
        set(),
        {"--kt-expert-placement-strategy", "--init-expert-location"},
    ),
    f"{SCHEDULING} frequency --init-expert-location {{stats}} --kt-enable-dynamic-expert-update {THRESHOLD} 512": (
        set(),
        {"--kt-enable-dynamic-expert-update", THRESHOLD},
    ),
    FLASH: (set(), {THRESHOLD, "--cuda-graph-bs", "--kt-enable-dynamic-expert-update"}),
    FLASH + SPECULATION: (set(), {"--max-prefill-tokens", "--speculative-algorithm"}),
    FLASH + "--nnodes 2": ({"--nnodes"}, set()),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tutorials")
    for name, family, more in (
        ("deepseek", "deepseek_v3", {"num_attention_heads": 4, "num_key_value_heads": 4, "v_head_dim": 32}),
        ("qwen", "qwen3_moe", {}),
        ("v4-alone", "deepseek_v4-hub", {"compress_ratios": [0, 4]}),
    ):
        save_tiny(family, folder / name, **(SIZES | more))
        config = json.loads((folder / name / "config.json").read_text())
        (folder / name / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 163840}))

    stream_drafted(folder / "v4-alone", folder / "v4", seed=5)  # Transformers write no draft layer

    def gptq_beside_fp8(module: str) -> str | None:
        return "gptq" if ".experts." in module else "fp8 blocks of 64" if module.endswith("o_proj") else None

    made = {
        "deepseek": gptq_beside_fp8, "int8": experts_only("int8 per channel"), "flash": experts_only("mxfp4 deepseek"),
    }  # fmt: skip
    plain = {name: folder / ("v4" if name == "flash" else "deepseek") for name in made}
    found = {name: save_quantised(plain[name], folder / f"made-{name}", made[name])[0] for name in made}
    return found | {"qwen": folder / "qwen", "stats": folder / "activation_stats.pt"}


def flags_of(texts: list[str] | tuple[str, ...]) -> set[str]:
    return {text.split()[0].rstrip(":") for text in texts}


@pytest.mark.parametrize("line", LINES)
def test_a_tutorial_s_line_starts_or_says_all_that_is_missing(places, line):
    refused, noted = LINES[line]
    argv = shlex.split(line.format(**places))
    config, reasons = EngineConfig.possible(argv)
    assert config is not None and flags_of(reasons) == refused
    machine = replace(these_cpus(), gpus=())
    plan = planned(config, machine).plan  # the rest of the line can be met
    assert flags_of(plan.notices) >= noted
    if refused:
        with pytest.raises(ConfigError) as error:
            possible_config(argv)
        assert flags_of(error.value.reasons) == refused
    else:
        assert possible_config(argv) == config and plan_of(config)


@pytest.mark.parametrize("line", [line for line, (refused, _) in LINES.items() if not refused])
def test_a_tutorial_s_line_answers(places, monkeypatch, line):
    answered(monkeypatch, line.format(**places))


def test_the_flash_tutorial_s_drafts_change_no_answer(places, monkeypatch):
    """Whatever the governor chooses, and with three draft tokens in every step."""
    always = FLASH + SPECULATION + "--disable-speculative-governor"
    lines = [line.format(**places) for line in (FLASH, FLASH + SPECULATION, always)]
    plain, governed, drafted = [answered(monkeypatch, line, tokens=24) for line in lines]
    assert governed[0] == drafted[0] == plain[0]
    assert plain[1] is None and governed[1].algorithm == "NEXTN" and drafted[1].widths[3] > 5


def answered(monkeypatch: pytest.MonkeyPatch, line: str, tokens: int = 3) -> tuple[list[int], SpeculationStats | None]:
    """By the engine that such a server starts, which says what it did with draft tokens."""
    monkeypatch.setattr(engine_process, "pin_main_thread", lambda cpu: None)  # this process has other tests to run
    loaded = engine_process.load_engine(EngineConfig.from_args([*shlex.split(line), "--device", "cpu"]))
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    try:
        [answer] = LLM.from_engine(loaded.engine).generate([[5, 6, 7]], params)
        assert len(answer.token_ids) == tokens
        return answer.token_ids, loaded.engine.stats().speculation
    finally:
        loaded.engine.close()


def test_the_flash_tutorial_s_converter_line(places, monkeypatch, tmp_path):
    """From the checkpoint's own FP4 experts. What it wrote is served."""
    line = f"""convert --input-path {places["flash"]} --input-type fp4 --output {tmp_path}/AMXINT4 --quant-method int4
      --cpuinfer-threads 64 --threadpool-count 4 --no-merge-safetensor"""
    done = CliRunner().invoke(app, shlex.split(line))
    assert done.exit_code == 0, done.output
    experts = f"--kt-weight-path {tmp_path}/AMXINT4 --kt-method AMXINT4"
    answered(monkeypatch, FLASH.replace("--kt-weight-path {flash} --kt-method MXFP4", experts).format(**places))


def test_what_the_model_and_the_machine_refuse_is_said_with_the_rest(places):
    line = "--nnodes 2 --tp 4 --kt-method AWQ --context-length 999999 --kernel-tier amx --kt-numa-nodes 9"
    with pytest.raises(ConfigError) as error:
        possible_config([str(places["qwen"]), *line.split()])
    expected = {"--nnodes", "--tensor-parallel-size", "--kt-method", "--context-length", "--kt-numa-nodes"}
    assert flags_of(error.value.reasons) >= expected
    config = json.loads((places["qwen"] / "config.json").read_text())
    other = places["qwen"].parent / "next-year"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(config | {"model_type": "next_year"}))
    with pytest.raises(ConfigError) as error:
        possible_config([str(other), "--nnodes", "2", "--kt-numa-nodes", "9"])
    assert flags_of(error.value.reasons) == {"--nnodes", "config.json", "--kt-numa-nodes"}


def test_two_ranks_of_the_flash_line_say_what_is_missing(places):
    line = FLASH.replace("parallel-size 1", "parallel-size 2").format(**places)
    with pytest.raises(ConfigError, match="96 rows of experts, .* cannot be divided among 2 ranks") as error:
        planned(EngineConfig.from_args(shlex.split(line)), replace(these_cpus(), gpus=()))
    assert flags_of(error.value.reasons) == {"--tensor-parallel-size"}


def test_the_tutorial_s_converter_line(places, tmp_path):
    line = f"""convert --input-path {places["qwen"]} --input-type fp32 --output {tmp_path}/AMXINT4 --quant-method int4
      --cpuinfer-threads 64 --threadpool-count 4 --no-merge-safetensor"""
    done = CliRunner().invoke(app, shlex.split(line.replace("--input-type fp32", "--input-type auto")))
    assert done.exit_code == 0, done.output
    flags = ["--kt-weight-path", f"{tmp_path}/AMXINT4", "--kt-method", "AMXINT4"]
    shown = {
        d.name: d.value for d in plan_of(EngineConfig.from_args([str(places["qwen"]), *flags])).decisions
    }
    assert shown["expert format"] == "int4 g32"
