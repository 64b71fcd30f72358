"""docs/quality.md's table by format is that of the rows. After a change: python scripts/quality_table.py --write"""

from __future__ import annotations

import json
import re
from types import ModuleType

from repo_scripts import script_module
from tandem.bench.known_quality import MeasuredExperts, quality_line
from tandem.formats.gguf_blocks import GGUF_CODES

script: ModuleType = script_module("quality_table")


def test_the_table_is_that_of_the_newest_rows() -> None:
    page = script.PAGE.read_text(encoding="utf-8")
    assert script.filled(page) == page
    rows = script.rows_kept()
    assert {row["what"] for row in rows} >= {
        script.UNROUNDED,
        script.DEFERRED,
        "`--kt-method INT4`",
        *script.STORED,
    }
    assert len({row["tokens"] for row in rows}) == len({row["reference_perplexity"] for row in rows}) == 1


def test_every_type_that_is_read_has_a_row() -> None:
    """Codes of each are also multiplied with int8 activations."""
    measured = {row["what"] for row in script.rows_kept()}
    assert measured >= {f"GGUF {label}" for name in GGUF_CODES for label in (name, f"{name} {script.ROUNDED}")}


def test_what_kt_bench_decode_says_is_in_the_table() -> None:
    known = json.loads(script.DEMO_FILE.read_text(encoding="utf-8"))
    assert known == script.of_methods()
    for name in ("INT8", "INT4", *GGUF_CODES):
        for int8_activations in (False, True):
            experts = MeasuredExperts(((name.lower(), 1.0),), int8_activations)
            figures = known[experts.name]
            line = quality_line("demo", True, experts)
            assert line is not None and line.startswith(f"{name}{' A8' if int8_activations else ''}: KL ")
            assert f"KL {figures['kl']:.5f} ± " in line and f"{figures['same_top']:.1%} (docs/quality.md)" in line


def test_what_kt_bench_decode_says_of_another_model() -> None:
    rounded = quality_line("org/name", False, MeasuredExperts((("INT4", 1.0),)))
    assert rounded is not None and "in the demo model" in rounded
    assert rounded.endswith("; kt quality org/name --format INT4 measures it")
    mixed = quality_line("m.gguf", False, MeasuredExperts((("q4_k", 0.75), ("q6_k", 0.25)), True, as_stored=True))
    known = script.of_methods()
    kl = 0.75 * known["Q4_K A8"]["kl"] + 0.25 * known["Q6_K A8"]["kl"]
    assert mixed is not None and f"Q4_K + Q6_K A8: KL {kl:.5f} nats" in mixed
    assert mixed.endswith("; kt quality m.gguf --reference ORIGINAL --kt-int8-activations measures it")
    new = quality_line("m", False, MeasuredExperts((("q4_k", 0.5), ("new", 0.5))))
    assert new == "Q4_K + NEW: what it costs is not known here; kt quality m --format Q4_K --format NEW measures it"
    assert quality_line("demo", True, MeasuredExperts((("bf16", 1.0),))) is None


def test_what_the_page_says_of_a_row_is_in_the_table() -> None:
    """92 %, every twelfth token, 2 % less likely: INT4's."""
    page = script.PAGE.read_text(encoding="utf-8")
    (row,) = (row for row in script.rows_kept() if row["what"] == "`--kt-method INT4`")
    (percent,) = re.findall(r"at (\d+) %, greedy answers", page)
    assert round(100 * row["same_top"]) == int(percent) and round(1 / (1 - row["same_top"])) in (12, 13)
    assert round(row["kl"], 2) == 0.02


def test_what_the_page_says_of_int8_activations() -> None:
    page, known = " ".join(script.PAGE.read_text(encoding="utf-8").split()), script.of_methods()
    for name in ("Q6_K", "Q4_K"):
        words = f"{known[name]['kl']:.4f} to {known[f'{name} A8']['kl']:.4f}"
        assert f"{name}'s KL goes from {words}" in page or f"{name}'s from {words}" in page
    for row in script.rows_kept():
        if row["what"].startswith("GGUF ") and row["bits"] < 4 and script.ROUNDED not in row["what"]:
            rounded = known.get(row["what"].removeprefix("GGUF ") + " A8")
            assert rounded is None or abs(rounded["kl"] - row["kl"]) < rounded["kl_error"] + row["kl_error"]


def test_the_page_has_the_rows_beside_llama_cpp() -> None:
    page = script.PAGE.read_text(encoding="utf-8")
    kept = [json.loads(file.read_text(encoding="utf-8")) for file in script.RESULTS.glob("*/peers.json")]
    rows = [row for rows in kept for row in rows if row.get("config") == "demo"]
    assert {row["format"] for row in rows} >= {"q8_0", "q4_0"}
    for row in rows:
        for name, end in (("Tandem", ""), ("llama.cpp", "_peer")):
            kl = f"{row[f'kl{end}']:.5f} ± {row[f'kl_error{end}']:.5f}"
            rates = f"{row[f'decode_tok_s{end}']:g}, {row[f'prompt_256_tok_s{end}']:g}"
            assert f"| {row['format'].upper()} | {name} | {kl} | {row[f'same_top{end}']:.2%} | {rates} |" in page
