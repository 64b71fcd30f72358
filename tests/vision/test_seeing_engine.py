"""Prompts with images through the engine: Transformers' answers, whatever is cut, found, preempted or drafted."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import msgspec
import pytest
import torch

from fake_model import run, token_ids
from seeing_requests import ONE, OTHER, PLAIN, PROMPTS, TALL, TWO, WIDE, check, request
from tandem.engine.engine import Engine
from tandem.engine.protocol import GenerateRequest
from tandem.engine.vision.spans import PixelSource
from tandem.errors import RequestError
from tandem.flags.engine_config import EngineConfig
from tiny_seeing import FAMILIES, Prompt, image, oracle, prompt, save_drafted, save_seeing, text

PAGE = 4


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    directory = tmp_path_factory.mktemp("seeing")

    @cache
    def path(variant: str) -> Path:
        save_seeing(variant, directory / variant)
        return directory / variant

    return path


def engine_of(path: Path, **flags: object) -> Engine:
    usual = {"dtype": "float32", "kt_cpuinfer": 2, "page_size": PAGE, "max_total_tokens": 400, "device": "cpu"}
    return Engine(EngineConfig.from_keywords(str(path), **(usual | flags)))


def answers(engine: Engine, *requests: GenerateRequest) -> dict[tuple[str, int], list[int]]:
    outputs = run(engine, *requests)
    assert all(each[-1].finish_reason == "length" for each in outputs.values()), outputs
    return {which: token_ids(each) for which, each in outputs.items()}


WAYS: dict[str, dict[str, object]] = {
    "usual": {},
    "chunks": {"chunked_prefill_size": 3},
    "no prefixes": {"disable_radix_cache": True},
    "tight": {"max_total_tokens": 60, "context_length": 48, "chunked_prefill_size": 8},
    "draft_tokens": {"speculative_algorithm": "NGRAM", "disable_speculative_governor": True},
    "deterministic": {"enable_deterministic_inference": True},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("variant", FAMILIES)
def test_answers_are_those_of_transformers(saved, variant: str, way: str) -> None:
    path, asked = saved(variant), PROMPTS
    engine = engine_of(path, **WAYS[way])
    if way == "tight":  # whole images between steps: answers then need their pages at the same time
        engine._scheduler.pace.slice_seconds = lambda share=0.0: 60.0
    found = answers(engine, *(request(name, each) for name, each in asked.items()))
    for name, each in asked.items():
        check(path, each, found[name, 0])
    stats = engine.stats()
    assert stats.images >= 2 and stats.image_seconds > 0
    assert (stats.preemptions > 0) == (way == "tight")
    engine.close()


def test_a_draft_layer_drafts_behind_images(saved, tmp_path) -> None:
    """Its rows take placeholders for tokens: draft tokens may be worse there, answers are the same."""
    path = saved("qwen3_5_moe")
    save_drafted(path, tmp_path / "drafted")
    engine = engine_of(tmp_path / "drafted", speculative_algorithm="NEXTN", disable_speculative_governor=True)
    found = answers(engine, *(request(name, each) for name, each in PROMPTS.items()))
    for name, each in PROMPTS.items():
        check(path, each, found[name, 0])
    assert engine.stats().speculation.draft_tokens > 0
    engine.close()


@pytest.mark.parametrize("variant", FAMILIES)
def test_answers_of_one_prompt_share_its_images(saved, variant: str) -> None:
    path = saved(variant)
    engine = engine_of(path)
    found = answers(engine, request("a", ONE, n=2))
    assert found["a", 0] == found["a", 1] and engine.stats().images == 1
    check(path, ONE, found["a", 0])
    engine.close()


def cached(engine: Engine, asked: Prompt) -> int:
    """Tokens that were found."""
    return run(engine, request("b", asked))["b", 0][-1].cached_tokens


@pytest.mark.parametrize("variant", FAMILIES)
def test_a_prompt_that_begins_alike_is_found_up_to_the_middle_of_an_image(saved, variant: str) -> None:
    """A model with states goes on at snapshots alone."""
    path = saved(variant)
    engine = engine_of(path)
    answers(engine, request("a", ONE))
    longer = prompt(list(ONE.ids[:6]), WIDE, text(5, 2), text(4, 8))
    seen = engine.stats().images
    found = run(engine, request("b", longer))["b", 0]
    check(path, longer, token_ids(found))
    assert found[-1].cached_tokens >= 12 and engine.stats().images == seen
    # Of the last 10 tokens an image has 4: its rows must be computed again, and are not seen again.
    shorter = prompt(list(ONE.ids[:6]), WIDE)
    found = run(engine, request("c", shorter))["c", 0]
    check(path, shorter, token_ids(found))
    if variant == "qwen3_vl_moe":
        assert found[-1].cached_tokens == 12
    engine.close()


@pytest.mark.parametrize("variant", FAMILIES)
def test_pictures_of_equal_size_share_nothing(saved, variant: str) -> None:
    path = saved(variant)
    engine = engine_of(path)
    answers(engine, request("a", ONE))
    other = prompt(list(ONE.ids[:6]), OTHER, list(ONE.ids[16:]))
    assert other.ids == ONE.ids
    found = run(engine, request("b", other))["b", 0]
    check(path, other, token_ids(found))
    assert found[-1].cached_tokens <= 4 and engine.stats().images == 2  # pages before the image
    again = run(engine, request("c", other))["c", 0]
    assert token_ids(again) == token_ids(found) and again[-1].cached_tokens >= 16
    assert engine.stats().images == 2
    engine.close()


def test_rows_that_were_found_are_not_seen(saved) -> None:
    """Old images of a conversation cost nothing, even when their features are gone."""
    engine = engine_of(saved("qwen3_vl_moe"))
    answers(engine, request("a", TWO))
    engine._encoder._cache._of.clear()
    assert cached(engine, prompt(list(TWO.ids[:3]), TALL, list(TWO.ids[7:9]), WIDE, text(4, 2), text(3, 5))) >= 20
    assert engine.stats().images == 2
    engine.close()


def test_an_image_that_cannot_be_read_ends_its_request_alone(saved) -> None:
    path = saved("qwen3_vl_moe")
    engine = engine_of(path)
    gone = PixelSource(height=16, width=40, path="/nowhere/at/all")
    span = msgspec.structs.replace(ONE.images[0], pixels=gone, key=b"another image...")
    broken = msgspec.structs.replace(request("a", ONE), images=(span,))
    outputs = run(engine, broken, request("b", TWO), request("c", PLAIN))
    assert outputs["a", 0][-1].finish_reason == "error" and "pixels of an image are gone" in outputs["a", 0][-1].error
    check(path, TWO, token_ids(outputs["b", 0]))
    check(path, PLAIN, token_ids(outputs["c", 0]))
    assert engine.stats().pages_free == engine.stats().pages_total
    engine.close()


def test_pixels_in_shared_memory(saved, tmp_path) -> None:
    path = saved("qwen3_vl_moe")
    (tmp_path / "pixels").write_bytes(b"before" + WIDE.inline + b"behind")
    there = PixelSource(height=16, width=40, path=str(tmp_path / "pixels"), offset=6)
    span = msgspec.structs.replace(ONE.images[0], pixels=there)
    engine = engine_of(path)
    found = answers(engine, msgspec.structs.replace(request("a", ONE), images=(span,)))
    check(path, ONE, found["a", 0])
    engine.close()


def test_those_who_decode_go_on_while_an_image_is_read(saved) -> None:
    """A piece a step at least, and no more than fits a slice."""
    engine = engine_of(saved("qwen3_vl_moe"))
    engine._scheduler.pace.slice_seconds = lambda share=0.0: 0.0
    engine.add(request("a", PLAIN, max_tokens=60))
    while not engine.step():
        pass
    engine.add(request("b", ONE))
    steps = [engine.step() for _ in range(4)]
    assert all(any(each.id == "a" for each in outputs) for outputs in steps)
    assert engine._encoder.under_way and engine._scheduler.running[1].computed_len == 0  # its text waits for it
    engine.abort("b")
    engine.step()
    assert not engine._encoder.under_way and engine.stats().images == 0
    engine.abort("")
    engine.close()


def test_many_images_are_one_chunk(saved) -> None:
    """Few rows in front of an image wait for it. Images that are there are taken at the admission."""
    path = saved("qwen3_vl_moe")
    engine = engine_of(path)
    many = prompt(*(part for i in range(20) for part in (text(1, i), image(16, 16, i))), text(3))
    for name, longer in (("a", many), ("b", prompt(text(2, 40), image(16, 16, 3), text(4, 5)))):
        before = engine.stats()
        check(path, longer, answers(engine, request(name, longer))[name, 0])
        assert engine.stats().steps - before.steps == 12  # the prompt and its first token, then 11 more
        assert engine.stats().images == 20
    engine.close()


def test_a_long_text_in_front_of_an_image_does_not_wait(saved) -> None:
    engine = engine_of(saved("qwen3_vl_moe"), chunked_prefill_size=8, max_running_requests=8)
    engine.add(request("a", prompt(text(21), WIDE, text(2))))
    engine.step()
    engine.step()
    assert engine._scheduler.running[0].computed_len == 16
    engine.abort("")
    engine.close()


@pytest.mark.parametrize("chunk", [4, None])
def test_features_that_are_held_make_others_wait(saved, chunk: int | None) -> None:
    """Room for one image: two requests, each with two, still end. Where nothing else fits, few rows do not wait."""
    path = saved("qwen3_vl_moe")
    engine = engine_of(path, chunked_prefill_size=chunk)
    engine._encoder._cache._most = 10 * engine._encoder._token_bytes
    first, second = prompt(text(2), WIDE, text(2), OTHER, text(2)), prompt(text(3), OTHER, text(2), TALL, text(2))
    found = answers(engine, request("a", first), request("b", second))
    check(path, first, found["a", 0])
    check(path, second, found["b", 0])
    assert engine._encoder._cache.nbytes <= engine._encoder._cache._most
    engine.close()


def test_without_a_tower_images_are_refused_by_name(saved) -> None:
    path = saved("qwen3_vl_moe")
    engine = engine_of(path, disable_vision=True)
    with pytest.raises(RequestError, match="--disable-vision was given"):
        engine.add(request("a", ONE))
    assert engine.model_config.vision is None and engine.model_config.tower is not None
    plain = engine_of(path)
    text_alone = [answers(each, request("a", PLAIN))["a", 0] for each in (engine, plain)]
    assert text_alone[0] == text_alone[1]
    engine.close()
    plain.close()


def test_packed_weights_serve_with_a_tower_and_without(saved, tmp_path, capfd) -> None:
    """Only what is missing is packed."""
    path, kept = saved("qwen3_vl_moe"), str(tmp_path / "packed")
    for disable_vision, said in ((True, "written to"), (False, "lacks"), (True, ""), (False, "")):
        engine = engine_of(path, packed_cache=kept, disable_vision=disable_vision)
        asked = PLAIN if disable_vision else TWO
        check(path, asked, answers(engine, request("a", asked))["a", 0])
        engine.close()
        told = capfd.readouterr().err
        assert said in told if said else "packed cache" not in told


def test_an_image_has_no_more_tokens_than_asked(saved) -> None:
    engine = engine_of(saved("qwen3_vl_moe"), image_max_tokens=256)
    assert engine.model_config.vision.processor.max_pixels == 256 * 64 and engine.plan.image_tokens == 256
    with pytest.raises(RequestError, match=r"images\[0\]: 128 x 136 pixels are more than the 16384"):
        engine.add(request("a", prompt(text(2), image(128, 136))))
    engine.close()


def test_a_tower_that_the_files_lack(saved, tmp_path) -> None:
    """As a checkpoint of text alone, whose config.json was kept."""
    from safetensors.torch import load_file, save_file

    source = saved("qwen3_vl_moe")
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    kept = {n: t for file in source.glob("*.safetensors") for n, t in load_file(file).items() if "visual" not in n}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)
    engine = engine_of(tmp_path)
    assert engine.plan.blind == "this model reads text only"
    assert any("the part that reads images or sound is not loaded" in said for said in engine.plan.notices)
    engine.close()


def test_oracle_is_exact_in_bfloat16(saved) -> None:
    """What was saved was rounded, so both sides begin with the same numbers."""
    for tensor in oracle(saved("qwen3_vl_moe")).parameters():
        assert torch.equal(tensor, tensor.bfloat16().float())
