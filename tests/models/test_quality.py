"""`kt quality`: the streamed layers give the model's own bits, and its numbers are those that theory expects."""

from __future__ import annotations

import json
import math
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from covering import one_of_each
from plans import GIB, MOE, machine, model_of
from tandem.architectures.load import load_config
from tandem.checkpoint import open_checkpoint
from tandem.cli.app import app
from tandem.cli.quality_run import QualityFlags, measure
from tandem.engine.state.arrays import allocate
from tandem.errors import CheckpointError, ConfigError
from tandem.machine.gpus import Gpu
from tandem.mechanisms.compressed_attention.shape import CompressedAttention
from tandem.mechanisms.experts.shape import Experts
from tandem.models import build
from tandem.models.layers import DecoderLayer
from tandem.planner.plan import Plan
from tandem.quality import text as texts
from tandem.quality.compare import OutputHead
from tandem.quality.measures import Divergence, divergences, kept_rows, losses, top_tokens
from tandem.quality.saved_logits import Origin, SavedLogits, writing
from tandem.quality.stream import WORKSPACE_BYTES, LayerStream, Variant
from tandem.spec.stored import StoredFormats
from tandem.text.tokenizer import Tokenizer
from tiny import VARIANTS, file_tensors
from windows import some_windows

F32 = "float32"


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(texts.default_text()[:400], encoding="utf-8")
    return path


def changed(source: Path, out: Path, change: dict[str, Tensor]) -> Path:
    """A copy of a tiny checkpoint with some tensors replaced."""
    out.mkdir()
    for file in source.glob("*.json"):
        (out / file.name).write_bytes(file.read_bytes())
    save_file(file_tensors(source) | change, out / "model.safetensors", metadata={"format": "pt"})
    return out


# -- the stream ---


@pytest.mark.parametrize(("variant", "dtype"), one_of_each(VARIANTS, [F32, "bfloat16"]))
def test_streamed_layers_give_the_models_bits(tiny_models, variant: str, dtype: str) -> None:
    path, windows = tiny_models[variant], some_windows()
    stream = LayerStream(Variant(path, dtype=dtype, threads=1), windows)
    for index in range(len(stream.config.layers)):
        stream.advance(stream.layer(index), stream.hidden)
    got = OutputHead(stream).logits(stream.hidden)
    model = build(stream.config, stream.plan, open_checkpoint(path), stream.ops)
    with torch.inference_mode():
        for span, batch in zip(windows.spans, stream._batches, strict=True):
            states = allocate(
                stream.config.state_layout(dtype, stream.plan.page_size), stream._pages_of(40), slots=2
            ).arrays
            expected = model.forward(batch, states)
            if dtype == F32 and any(isinstance(mixer, CompressedAttention) for mixer in stream.config.mixers):
                # its attention is torch's products, whose sums of float32 are ordered by how many keys lie beside
                torch.testing.assert_close(got[span], expected, rtol=2.0**-18, atol=2.0**-18)
            else:
                assert torch.equal(got[span], expected)


def test_windows_cover_the_text_once(tiny_models) -> None:
    tokenizer, text = Tokenizer.load(tiny_models["olmoe"]), "abcdefghij" * 5
    windows = texts.cut(tokenizer, text, window=16, limit=47)
    assert [len(w) for w in windows.ids] == [16, 16, 15]
    assert windows.tokens.tolist() == tokenizer.encode(text)[:47]
    assert len(windows.predicting) == 47 - 3
    assert (
        15 not in windows.predicting and 46 not in windows.predicting
    )  # nothing follows them in their window
    with pytest.raises(ConfigError, match="predict nothing"):
        texts.cut(tokenizer, "a", window=16, limit=47)


def test_the_default_text_is_long_enough_for_the_default_tokens(demo_dir: Path) -> None:
    assert len(Tokenizer.load(demo_dir).encode(texts.default_text())) >= QualityFlags("demo").tokens


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_placement_on_a_gpu_needs_one(tiny_models, share: float) -> None:
    with pytest.raises(ConfigError, match=r"--kt-gpu-experts-ratio 0.* needs a GPU, but .*; leave it out"):
        LayerStream(Variant(tiny_models["qwen3_moe-gpu"], gpu_share=share), some_windows())


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_layer_that_the_gpu_has_no_room_for_is_refused_before_anything_is_read(share: float) -> None:
    """512 experts of 2048 x 4096 in bf16: 24 GiB a layer."""
    moe = replace(MOE, experts=Experts(512, 4096), router=replace(MOE.router, num_experts=512))
    model, path = replace(model_of(moe), hidden=2048), Path("nowhere")
    experts, needed = 24 * GIB * share, 24 * GIB * share + WORKSPACE_BYTES

    def planned(free: float) -> Plan:
        here = replace(machine(), gpus=(Gpu("H100", 80 * GIB, int(free), "gen5 x16"),), gpu_missing=())
        large = replace(here, available_memory=1 << 50)
        return Variant(path, gpu_share=share).plan(model, large, 32, StoredFormats())

    with pytest.raises(
        ConfigError, match=rf"H100 is too small: .* {experts / GIB:.1f} GiB for {512 * share:.0f} exp"
    ):
        planned(needed)  # its dense weights do not fit any more
    assert planned(needed + 2 * GIB).gpu is not None


# -- the measures ---


def test_divergence_of_a_raised_logit_is_the_closed_form() -> None:
    """Uniform over V against one logit raised by d: log Z' - log V - d / V, with Z' = V - 1 + e^d."""
    for vocab, raised in ((5, 0.3), (1000, 4.0)):
        flat = torch.zeros(2, vocab)
        other = flat.clone()
        other[:, 3] = raised
        expected = math.log(vocab - 1 + math.exp(raised)) - math.log(vocab) - raised / vocab
        got = divergences(kept_rows(flat, torch.zeros(2, dtype=torch.long)), other)
        torch.testing.assert_close(got, torch.full((2,), expected, dtype=torch.float64), rtol=1e-6, atol=0)


def test_divergence_of_a_temperature_is_half_its_square_times_the_variance() -> None:
    """d²/dε² KL(p ‖ softmax((1 + ε) z)) at 0 is Var_p(z); the next term is of order ε³."""
    torch.manual_seed(0)
    z, epsilon = torch.randn(20, 300), 1e-3
    p = z.double().softmax(-1)
    variance = (p * z.double() ** 2).sum(-1) - (p * z.double()).sum(-1) ** 2
    rows = kept_rows(z.double(), torch.zeros(20, dtype=torch.long))
    got = divergences(rows, z.double() * (1 + epsilon))
    torch.testing.assert_close(got, epsilon**2 / 2 * variance, rtol=10 * epsilon, atol=0)


def test_cut_rows_give_a_lower_bound_that_grows_to_the_true_value() -> None:
    torch.manual_seed(0)
    z, other, targets = torch.randn(30, 200), torch.randn(30, 200), torch.randint(200, (30,))
    true = divergences(kept_rows(z, targets), other)
    bounds = [divergences(kept_rows(z, targets, keep), other) for keep in (1, 10, 100, 200)]
    for smaller, larger in zip(bounds, [*bounds[1:], true], strict=True):
        assert (smaller <= larger + 1e-12).all()
    assert torch.equal(bounds[-1], true)
    assert torch.equal(top_tokens(kept_rows(z, targets, 10)), z.argmax(-1))


def test_tokens_that_cannot_come_do_not_spoil_the_sum() -> None:
    z = torch.tensor([[0.0, -math.inf, 1.0]])
    rows = kept_rows(z, torch.tensor([0]))
    assert divergences(rows, z).item() == 0
    assert divergences(kept_rows(z, torch.tensor([0]), 2), z).item() == 0


def test_summary_of_divergences() -> None:
    kl = torch.arange(1, 101, dtype=torch.float64) / 100
    got = Divergence.of(kl, torch.arange(100) < 90)
    assert (got.mean, got.median, got.percentile_99, got.largest) == pytest.approx((0.505, 0.5, 0.99, 1.0))
    assert got.same_top == pytest.approx(0.9)
    assert got.error == pytest.approx(float(kl.std()) / 10)


# -- from checkpoints to numbers ---


def request(model: Path, text: Path, **changes: object) -> QualityFlags:
    base = QualityFlags(str(model), text=text, window=100, tokens=300, dtype=F32, reference_dtype=F32, threads=1)
    return replace(base, **changes)


def test_the_same_model_twice_differs_by_nothing(tiny_models, text_file: Path) -> None:
    path = tiny_models["glm4_moe"]
    [same] = measure(request(path, text_file, reference=str(path))).measured
    assert same.divergence == Divergence(0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
    assert all(error.own == error.total == 0 for error in same.layers)


def test_one_layer_is_in_memory_at_a_time(
    tiny_models, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before is gone when the next is read, the reference's and those of several formats."""
    made: list[weakref.ref[object]] = []  # layers' MLPs
    read = LayerStream.layer

    def watched(self: LayerStream, index: int) -> DecoderLayer:
        assert not any(layer() for layer in made)
        layer = read(self, index)
        made.append(weakref.ref(layer.blocks[1].operator))
        return layer

    monkeypatch.setattr(LayerStream, "layer", watched)
    measure(request(tiny_models["qwen3_moe"], text_file, methods=("INT8", "INT4")))
    assert len(made) >= 6


def test_doubled_logits_diverge_as_theory_says(tiny_models, text_file: Path, tmp_path: Path) -> None:
    """Twice the final norm is twice every logit, exactly. What that must give follows from Transformers' logits."""
    path = tiny_models["qwen3_moe"]
    norm = file_tensors(path)["model.norm.weight"]
    doubled = changed(path, tmp_path / "doubled", {"model.norm.weight": 2 * norm})
    report = measure(request(doubled, text_file, reference=str(path)))
    z, targets = transformers_logits(path, text_file)
    expected = divergences(kept_rows(z, targets), 2 * z)
    [got] = report.measured
    assert report.reference_perplexity == pytest.approx(math.exp(losses(z, targets).mean()), rel=1e-4)
    assert got.perplexity == pytest.approx(math.exp(losses(2 * z, targets).mean()), rel=1e-4)
    assert got.divergence.mean == pytest.approx(float(expected.mean()), rel=1e-3)
    assert got.divergence.percentile_99 == pytest.approx(float(expected.sort().values[294]), rel=1e-3)
    assert got.divergence.same_top == 1.0


def transformers_logits(path: Path, text: Path) -> tuple[Tensor, Tensor]:
    """(logits of all predictions, what came)."""
    windows = texts.cut(Tokenizer.load(path), text.read_text(), 100, 300)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        rows = [model(torch.tensor([w])).logits[0, :-1] for w in windows.ids]
    return torch.cat(rows), torch.tensor([t for w in windows.ids for t in w[1:]])


def test_the_layer_that_was_changed_is_named(tiny_models, text_file: Path, tmp_path: Path) -> None:
    path, name = tiny_models["mixtral"], "model.layers.1.self_attn.o_proj.weight"
    other = changed(path, tmp_path / "other", {name: file_tensors(path)[name] * 1.1})
    [got] = measure(request(other, text_file, reference=str(path), layer_kl=True)).measured
    assert [error.own > 0 for error in got.layers] == [False, True, False]
    assert [error.total > 0 for error in got.layers] == [False, True, True]
    assert [error.kl for error in got.layers] == [0.0, pytest.approx(got.divergence.mean), 0.0]
    assert got.divergence.mean > 0


def test_coarser_formats_are_further_away(tiny_models, text_file: Path) -> None:
    report = measure(request(tiny_models["glm4_moe"], text_file, dtype="auto", reference_dtype="auto"))
    int8, int4 = report.measured
    assert (int8.format, int4.format) == ("int8", "int4")
    assert 0 < int8.divergence.mean < int4.divergence.mean
    assert int8.layers[0].own == 0.0  # dense: only routed experts are rounded
    assert all(a.own < b.own for a, b in zip(int8.layers[1:], int4.layers[1:], strict=True))


# -- saved logits ---


@pytest.mark.parametrize("keep", [0, 20])
def test_saved_logits_stand_for_the_reference(
    tiny_models, text_file: Path, tmp_path: Path, keep: int
) -> None:
    path, file = tiny_models["olmoe"], tmp_path / "new" / "logits.safetensors"
    alone = measure(request(path, text_file, save_logits=file, keep=keep))
    assert alone.measured == () and alone.reference_perplexity is not None
    direct = measure(request(path, text_file, methods=("INT4",), dtype="auto"))
    saved = measure(request(path, text_file, methods=("INT4",), dtype="auto", reference_logits=file))
    a, b = direct.measured[0], saved.measured[0]
    assert saved.reference_perplexity == pytest.approx(alone.reference_perplexity, rel=1e-12)
    assert a.perplexity == b.perplexity and a.divergence.same_top == b.divergence.same_top
    assert saved.kl_is_exact == (keep == 0) and saved.reference == str(path)
    if keep == 0:
        assert a.divergence == b.divergence
    else:
        assert 0 < b.divergence.mean < a.divergence.mean
    assert list(file.parent.iterdir()) == [file]


def test_logits_of_something_else_are_refused(tiny_models, text_file: Path, tmp_path: Path) -> None:
    path, file = tiny_models["olmoe"], tmp_path / "logits.safetensors"
    measure(request(path, text_file, save_logits=file))
    with pytest.raises(ConfigError, match="another text, tokenizer, --window"):
        measure(request(path, text_file, reference_logits=file, window=50))
    whole = file.read_bytes()
    for broken in (whole[:-9], whole[:20], b"", whole.replace(b"tandem-logits-1", b"tandem-logits-9")):
        file.write_bytes(broken)
        with pytest.raises(CheckpointError, match="logits.safetensors is not a file of --save-logits"):
            measure(request(path, text_file, reference_logits=file))
    with pytest.raises(ConfigError, match="leave out --reference,"):
        request(path, text_file, reference_logits=file, reference=str(path))


def test_a_file_half_written_does_not_appear(tmp_path: Path) -> None:
    file, rows = tmp_path / "logits.safetensors", kept_rows(torch.randn(2, 9), torch.tensor([1, 2]), 4)
    with pytest.raises(RuntimeError, match="stopped"), writing(file, Origin("m", "d", 4, 9, 4)) as writer:
        writer.append(rows)
        raise RuntimeError("stopped")
    assert list(tmp_path.iterdir()) == []
    with writing(file, Origin("m", "d", 2, 9, 4)) as writer:
        writer.append(rows)
    for got, expected in zip(SavedLogits(file).rows(0, 2), rows, strict=True):
        assert torch.equal(got, expected)
    (tmp_path / "in the way").write_text("")
    with (
        pytest.raises(ConfigError, match="cannot be written"),
        writing(tmp_path / "in the way" / "x", Origin("m", "d", 2, 9, 4)),
    ):
        pass


# -- the command ---


def kt(*argv: str | Path):
    return CliRunner().invoke(app, [str(word) for word in argv], env={"COLUMNS": "120", "TERM": "dumb"})


def test_command_prints_tables_and_writes_json_and_a_picture(
    tiny_models, text_file: Path, tmp_path: Path
) -> None:
    path, out, plot = tiny_models["qwen2_moe"], tmp_path / "q.json", tmp_path / "q.png"
    words = [
        "quality",
        path,
        "--format",
        "INT4",
        "--text",
        text_file,
        "--window",
        "100",
        "--kt-cpuinfer",
        "1",
    ]
    shown = kt(*words, "--out", out, "--plot", plot)
    assert shown.exit_code == 0, shown.output
    assert "INT4 total" in shown.stdout and "same top" in shown.stdout
    report = json.loads(out.read_text())
    [got] = report["measured"]
    assert got["format"] == "int4" and got["divergence"]["mean"] > 0 and len(got["layers"]) == 3
    assert report["kl_is_exact"] and report["predictions"] == 400 - 5 + report["predictions"] % 5
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_mistakes_are_named_before_anything_runs(tiny_models, text_file: Path, tmp_path: Path) -> None:
    path = tiny_models["olmoe"]
    for change, message in [
        ({"window": 4000}, "windows of 400 tokens .* goes to 128; give a smaller --window"),
        ({"text": tmp_path / "absent"}, "--text .*absent cannot be read"),
        ({"methods": ("INT5",)}, "must be one of"),
        ({"reference": str(tiny_models["mixtral"].parent / "nowhere")}, "nowhere"),
    ]:
        with pytest.raises((ConfigError, CheckpointError), match=message):
            measure(replace(request(path, text_file, tokens=5000), **change))


def test_models_of_different_shape_are_refused(tiny_models, text_file: Path, tmp_path: Path) -> None:
    path = tiny_models["olmoe"]
    other = changed(path, tmp_path / "shorter", {})
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    assert len(load_config(other).layers) == 2
    with pytest.raises(ConfigError, match="has 3 layers, the reference 2"):
        measure(request(path, text_file, reference=str(other)))


def test_deferred_experts_diverge_and_the_usual_way_does_not(tiny_models, text_file: Path) -> None:
    request = QualityFlags(str(tiny_models["qwen3_moe"]), text=text_file, window=64, threads=1, deferred=1)
    usual, deferred = measure(request).measured
    assert (usual.label, deferred.label) == ("as stored", "as stored, 1 deferred")
    assert usual.divergence is not None and deferred.divergence is not None
    assert usual.divergence.mean == 0 < deferred.divergence.mean
    assert deferred.layers[-1].own == 0 < deferred.layers[-1].total  # the last layer never defers


def test_deferred_experts_of_a_layer_alone_are_not_measured() -> None:
    with pytest.raises(ConfigError, match="leave out --layer-kl or --kt-max-deferred-experts-per-token"):
        QualityFlags("demo", deferred=1, layer_kl=True)
