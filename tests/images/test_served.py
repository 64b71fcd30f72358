"""A real server around a tiny random Qwen3-VL: clients show it pictures, and its answers are Transformers' own."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from pictures import png, turned
from seeing_model import save_chatting
from seeing_server import PAD, SEEN, image_part, url, user
from server_harness import ServerProcess, running, spawn_real
from tandem.engine.images.decode import decoded
from tandem.engine.images.question import Ask
from tandem.engine.vision.spans import PixelSource
from tiny_seeing import PROCESSOR, prompt, reference

ANSWER = 8
RED, BLUE = png(61, 43, 1), png(40, 24, 2)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("seeing") / "qwen3_vl_moe"
    save_chatting(path)
    return path


@pytest.fixture(scope="module")
def server(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("log") / "log"
    flags = ("--dtype", "float32", "--kt-cpuinfer", "2", "--device", "cpu", "--max-total-tokens", "2048")
    with running(spawn_real(path, log, *flags, "--tool-call-parser", "none")) as one:
        yield one


def source(data: bytes) -> PixelSource:
    ask = Ask(side=PROCESSOR.side, min_pixels=PROCESSOR.min_pixels, max_pixels=PROCESSOR.max_pixels)
    found, pixels = decoded(data, ask)
    return PixelSource(height=found.height, width=found.width, inline=pixels)


def check(path: Path, text: str, images: list[bytes], answer: list[int]) -> None:
    """Each token of the answer is Transformers' own behind the prompt and those before it."""
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    pieces = text.split(PAD)
    parts: list[Any] = [tokenizer.encode(pieces[0]).ids]
    for data, piece in zip(images, pieces[1:], strict=True):
        parts += [source(data), tokenizer.encode(piece).ids]
    asked = prompt(*parts)
    logits = reference(path, asked, tuple(answer))[len(asked.ids) - 1 : -1, :256]
    assert len(answer) == ANSWER and logits.argmax(-1).tolist() == answer


def token_of(shown: dict[str, Any]) -> int:
    """The tiny tokenizer's id of a token of one byte, which byte-level tokenizers write as a letter: printable ones as
    they are, others from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    [byte] = shown["bytes"]
    letter = chr(byte) if byte in printable else chr(256 + others.index(byte))
    return sorted(pre_tokenizers.ByteLevel.alphabet()).index(letter)


GREEDY: dict[str, Any] = {
    "temperature": 0.0, "max_tokens": ANSWER, "logprobs": True, "logit_bias": {str(i): -100 for i in range(256, 262)},
}  # fmt: skip


def test_answers_are_those_of_transformers(server, path):
    from openai import OpenAI

    client = OpenAI(base_url=f"{server.url}/v1", api_key="x")
    assert client.models.list().data[0].model_extra["capabilities"]["vision"]
    for images in ([RED], [RED, BLUE], [BLUE, RED], [turned(6)]):
        content = [{"type": "text", "text": "See "}, *map(image_part, images), {"type": "text", "text": "?"}]
        made = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": content}], extra_body={"ignore_eos": True}, **GREEDY
        )
        answer = [token_of(each.model_dump()) for each in made.choices[0].logprobs.content]
        text = f"<|turn|>user:See {SEEN * len(images)}?<|done|><|turn|>assistant:"
        check(path, text, images, answer)


def tower_images(server: ServerProcess) -> float:
    lines = server.get("/metrics").text.splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("tandem_tower_images_total")))


def test_a_second_turn_finds_the_image_in_the_cache(server):
    """The tower does not read it again."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{server.url}/v1", api_key="x")
    messages: list[Any] = [user("Look: ", image_part(png(40, 56, 9)))]
    first = client.chat.completions.create(model="m", messages=messages, max_tokens=4)
    read = tower_images(server)
    messages += [{"role": "assistant", "content": "It is"}, user("And now?")]
    second = client.chat.completions.create(model="m", messages=messages, max_tokens=4)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= 0.9 * first.usage.prompt_tokens
    assert tower_images(server) == read > 0
    assert first.usage.prompt_tokens > 35  # those of the image


def test_anthropics_client(server):
    from anthropic import Anthropic

    data = base64.b64encode(RED).decode()
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    messages: Any = [{"role": "user", "content": [block, {"type": "text", "text": "What is this?"}]}]
    client = Anthropic(base_url=server.url, api_key="x")
    count = client.messages.count_tokens(model="m", messages=messages).input_tokens
    made = client.messages.create(model="m", messages=messages, max_tokens=4)
    usage = made.usage
    assert count == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    with client.messages.stream(model="m", messages=messages, max_tokens=4) as stream:
        assert stream.get_final_message().usage.output_tokens


def test_ollamas_client(server, tmp_path):
    from ollama import Client

    client = Client(host=server.url)
    assert "vision" in client.show("m").capabilities
    (tmp_path / "a.png").write_bytes(RED)
    for image in (RED, str(tmp_path / "a.png"), base64.b64encode(RED).decode()):
        made = client.chat(
            model="m", messages=[{"role": "user", "content": "?", "images": [image]}], options={"num_predict": 4}
        )
        text = "<|turn|>user:?<|done|><|turn|>assistant:"  # a token for each letter, and two around the image's
        assert made.prompt_eval_count == len(text) + 2 + PROCESSOR.tokens(grid_of(RED))
    assert client.generate(model="m", prompt="?", images=[RED], options={"num_predict": 4}).eval_count


def grid_of(data: bytes) -> tuple[int, int, int]:
    one = source(data)
    return PROCESSOR.grid(one.height, one.width)


def test_responses_go_on_from_an_image(server):
    from openai import OpenAI

    client = OpenAI(base_url=f"{server.url}/v1", api_key="x")
    image = {"type": "input_image", "image_url": url(BLUE), "detail": "auto"}
    content: Any = [image, {"type": "input_text", "text": "?"}]
    first = client.responses.create(model="m", input=[{"role": "user", "content": content}], max_output_tokens=16)
    second = client.responses.create(
        model="m", input="And?", previous_response_id=first.id, max_output_tokens=16
    )
    assert second.usage.input_tokens > first.usage.input_tokens


def test_a_wrong_image_ends_its_request_alone(server):
    from openai import BadRequestError, OpenAI

    client = OpenAI(base_url=f"{server.url}/v1", api_key="x")
    with pytest.raises(BadRequestError, match="cannot be decoded") as caught:
        client.chat.completions.create(model="m", messages=[user(image_part(png(300, 300)[:4000]))], max_tokens=4)
    assert caught.value.code == "invalid_image"
    made = client.chat.completions.create(model="m", messages=[user(image_part(RED))], max_tokens=4)
    assert made.usage.completion_tokens
