"""Images in /v1/chat/completions: where they stand in the prompt, what reaches the engine, and what is refused."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import Any

import pytest

from pictures import animated, bomb, encoded, picture, png
from seeing_server import SEEN, SEES_ALL, USER_ONLY, Seeing, image_part, run_seeing, url, user
from server_requests import CHAT
from tandem.engine.images.decode import decoded
from tandem.engine.images.question import Ask
from tandem.server import body as body_module
from tandem.server import limits
from tandem.server.prompts import images as prompt_images

ASK = Ask(side=32, min_pixels=4 * 1024, max_pixels=1024 * 1024)
RED, BLUE = png(64, 64, 1), png(96, 64, 2)
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def pixels(data: bytes, ask: Ask = ASK) -> bytes:
    return decoded(data, ask)[1]


def test_images_stand_where_they_were_sent():
    async def scenario(server: Seeing) -> None:
        asked = [user("See ", image_part(RED), " and ", image_part(BLUE), "?")]
        answer = await server.post(CHAT, messages=asked)
        assert answer.status_code == 200, answer.text
        assert server.last.text == f"<|turn|>user:See {SEEN} and {SEEN}?<|done|><|turn|>assistant:"
        assert server.last.pixels == [pixels(RED), pixels(BLUE)]
        spans = server.last.request.images
        assert [(span.rows, span.grid) for span in spans] == [(4, (1, 4, 4)), (6, (1, 4, 6))]
        assert answer.json()["usage"]["prompt_tokens"] == len(server.last.request.prompt_ids)
        assert "x-tandem-ignored" not in answer.headers

    run_seeing(scenario)


def test_other_ways_to_write_one():
    async def scenario(server: Seeing) -> None:
        for part in (
            {"type": "image", "image": url(RED)}, {"type": "image", "url": url(RED)},
            {"type": "input_image", "image_url": url(RED)}, {"type": "image_url", "image_url": url(RED)},
        ):  # fmt: skip
            answer = await server.post(CHAT, messages=[user(part)])
            assert answer.status_code == 200, answer.text
            assert server.last.pixels == [pixels(RED)]

    run_seeing(scenario)


def test_a_text_is_as_if_no_model_saw():
    """Bytes of prompts and content for templates are the same; nothing is decoded, and no process is started."""
    asked: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": "Hello"}], [user("one", "two")],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, user("c")],
    ]  # fmt: skip
    said: dict[bool, list[list[int]]] = {True: [], False: []}
    for sees in said:

        async def scenario(server: Seeing, sees: bool = sees) -> None:
            for messages in asked:
                assert (await server.post(CHAT, messages=messages)).status_code == 200
                said[sees].append(server.last.request.prompt_ids)
                assert server.last.request.images == ()
            if server.state.images is not None:
                assert server.state.images._process._process is None

        run_seeing(scenario, sees=sees)
    assert said[True] == said[False]


def test_the_same_image_is_decoded_once_and_has_one_key():
    async def scenario(server: Seeing) -> None:
        for _ in range(3):
            await server.post(CHAT, messages=[user(image_part(RED), image_part(BLUE))])
        keys = [[span.key for span in shown.request.images] for shown in server.seen]
        assert keys[0] == keys[1] == keys[2] and len(set(keys[0])) == 2
        counts = server.state.images.counts
        assert (counts.decoded, counts.again) == (2, 4)
        metrics = (await server.client.get("/metrics")).text
        assert 'tandem_images_total{outcome="decoded"} 2.0' in metrics
        assert 'tandem_images_total{outcome="again"} 4.0' in metrics
        assert "tandem_image_decode_seconds_total" in metrics and "tandem_tower_seconds_total" in metrics

    run_seeing(scenario)


def test_equal_pixels_of_other_files_have_one_key():
    image = picture("RGB", 64, 64)

    async def scenario(server: Seeing) -> None:
        parts = [image_part(encoded(image)), image_part(encoded(image, compress_level=1))]
        await server.post(CHAT, messages=[user(*parts)])
        first, second = server.last.request.images
        assert first.key == second.key and first.pixels == second.pixels

    run_seeing(scenario)


def test_low_detail_is_small():
    large = png(1000, 1000)

    async def scenario(server: Seeing) -> None:
        parts = [image_part(large, detail="low"), image_part(large, detail="high"), image_part(large)]
        await server.post(CHAT, messages=[user(*parts)])
        low, high, auto = (span.rows for span in server.last.request.images)
        assert low <= limits.LOW_DETAIL_TOKENS < high == auto <= 1024

    run_seeing(scenario)


RESULTS = [
    {"role": "user", "content": "Look."}, {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "Here:"}, image_part(RED)]},
]  # fmt: skip


def test_a_tools_result_has_images():
    async def scenario(server: Seeing) -> None:
        answer = await server.post(CHAT, messages=RESULTS)
        assert answer.status_code == 200, answer.text
        assert f"<|turn|>tool:Here:{SEEN}<|done|><|turn|>assistant:" in server.last.text
        assert server.last.pixels == [pixels(RED)]

    run_seeing(scenario, tool_call_parser="none")


def test_where_a_template_shows_no_images_of_tools_the_user_shows_them():
    second = CALL | {"id": "call_2"}
    messages = [
        RESULTS[0], {"role": "assistant", "content": None, "tool_calls": [CALL, second]}, RESULTS[2],
        {"role": "tool", "tool_call_id": "call_2", "content": "two"},
        user("Well?", image_part(BLUE)),
    ]  # fmt: skip

    async def scenario(server: Seeing) -> None:
        answer = await server.post(CHAT, messages=messages)
        assert answer.status_code == 200, answer.text
        assert server.last.text.endswith(
            f"tool:Here:<|done|><|turn|>tool:two<|done|><|turn|>user:{SEEN}<|done|><|turn|>user:Well?{SEEN}<|done|>"
            "<|turn|>assistant:"
        )
        assert server.last.pixels == [pixels(RED), pixels(BLUE)]

    run_seeing(scenario, USER_ONLY, tool_call_parser="none")


def test_system_messages_and_assistants_may_have_them():
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Rules"}, image_part(RED)]}, user("Hi"),
        {"role": "assistant", "content": [{"type": "text", "text": "This:"}, image_part(BLUE)]}, user("Well?"),
    ]  # fmt: skip

    async def scenario(server: Seeing) -> None:
        answer = await server.post(CHAT, messages=messages)
        assert answer.status_code == 200, answer.text
        assert f"assistant:This:<|done|><|turn|>user:{SEEN}<|done|>" in server.last.text
        assert server.last.pixels == [pixels(RED), pixels(BLUE)]

    run_seeing(scenario)
    run_seeing(scenario, USER_ONLY)


def test_a_placeholder_that_a_message_spells_is_text():
    async def scenario(server: Seeing) -> None:
        answer = await server.post(CHAT, messages=[user(f"What is {SEEN}?", image_part(RED))])
        assert answer.status_code == 200, answer.text
        assert len(server.last.request.images) == 1
        assert server.last.request.prompt_ids.count(server.pad) == 4
        answer = await server.post(CHAT, messages=[user(f"What is {SEEN}?")])
        assert answer.status_code == 200 and server.pad not in server.last.request.prompt_ids

    run_seeing(scenario)


def test_later_frames_are_named():
    async def scenario(server: Seeing) -> None:
        answer = await server.post(CHAT, messages=[user("See", image_part(animated()))])
        ignored = answer.headers["x-tandem-ignored"]
        assert ignored == "messages[0].content[1].image_url.url.later_frames"

    run_seeing(scenario)


WHERE = "messages[0].content[0].image_url.url"
REFUSED: dict[str, tuple[Any, str, str]] = {
    "address": ({"url": "https://example.org/a.png"}, "image_url_not_allowed", "data:image/png;base64,"),
    "file": ({"url": "file:///etc/passwd"}, "image_url_not_allowed", "data:image/png;base64,"),
    "path": ({"url": "/etc/passwd"}, "image_url_not_allowed", "data:image/png;base64,"),
    "nothing": ({}, "invalid_image", "data:image/png;base64,"),
    "number": ({"url": 7}, "invalid_image", "data:image/png;base64,"),
    "percent": ({"url": "data:image/png,%89PNG"}, "invalid_image", "base64"),
    "no base64": ({"url": "data:image/png;base64,!!!"}, "invalid_image", "no base64"),
    "other letters": ({"url": "data:image/png;base64,äöü"}, "invalid_image", "no base64"),
    "text": ({"url": "data:text/plain;base64,SGVsbG8="}, "invalid_image", "PNG, JPEG, WEBP or GIF"),
    "truncated": ({"url": url(png(300, 300)[:5000])}, "invalid_image", "cannot be decoded"),
    "bomb": ({"url": url(bomb())}, "image_too_large", "20000 x 20000"),
    "narrow": ({"url": url(encoded(picture("L", 300, 1)))}, "invalid_image", "too narrow"),
    "large": ({"url": url(bytes(21 << 20))}, "image_too_large", "21.0 MiB"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_names_its_field_and_the_next_request_is_answered(case):
    given, code, said = REFUSED[case]

    async def scenario(server: Seeing) -> None:
        part = {"type": "image_url", "image_url": given}
        answer = await server.post(CHAT, messages=[{"role": "user", "content": [part]}])
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == (code, WHERE) and said in error["message"]
        assert not server.seen
        assert (await server.post(CHAT, messages=[user(image_part(RED))])).status_code == 200

    run_seeing(scenario)


@pytest.mark.parametrize("case", ["address", "truncated", "bomb", "no base64"])
def test_in_an_older_turn_it_is_a_note(case):
    """A refusal would come again with every later request of an agent."""
    given = {"type": "image_url", "image_url": REFUSED[case][0]}
    answered = {"role": "assistant", "content": "I"}
    older = [{"role": "user", "content": [given]}, answered, user("Well?", image_part(RED))]
    result = [*RESULTS[:2], RESULTS[2] | {"content": [given, image_part(RED)]}]

    async def scenario(server: Seeing) -> None:
        for messages in (older, result):
            answer = await server.post(CHAT, messages=messages)
            assert answer.status_code == 200, answer.text
            assert "[an image, which cannot be shown to you: " in server.last.text
            assert server.last.pixels == [pixels(RED)]
            assert "messages[" in answer.headers["x-tandem-ignored"]

    run_seeing(scenario, tool_call_parser="none")


def test_videos_and_sounds_are_refused():
    async def scenario(server: Seeing) -> None:
        for kind in ("video_url", "input_audio"):
            part = {"type": kind, kind: {"url": "x"}}
            answer = await server.post(CHAT, messages=[{"role": "user", "content": [part]}])
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "not_available"
            assert ("send frames as images" in answer.text) == (kind == "video_url")

    run_seeing(scenario)


def test_at_most_a_hundred_images():
    async def scenario(server: Seeing) -> None:
        parts = [image_part(png(32, 32, seed % 3)) for seed in range(limits.MAX_IMAGES)]
        answer = await server.post(CHAT, messages=[user(*parts)])
        assert answer.status_code == 200 and len(server.last.pixels) == limits.MAX_IMAGES
        answer = await server.post(CHAT, messages=[user(*parts, image_part(RED))])
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "too_many_images")
        assert error["param"] == "messages[0].content[100].image_url.url"

    run_seeing(scenario)


def test_the_pixels_of_a_request_are_bounded(monkeypatch):
    monkeypatch.setattr(prompt_images, "MAX_IMAGE_PIXELS", 3 * 64 * 64)

    async def scenario(server: Seeing) -> None:
        parts = [image_part(png(64, 64, seed)) for seed in range(4)]
        assert (await server.post(CHAT, messages=[user(*parts[:3])])).status_code == 200
        error = (await server.post(CHAT, messages=[user(*parts)])).json()["error"]
        assert (error["code"], error["param"]) == ("image_too_large", "messages[0].content[3].image_url.url")

    run_seeing(scenario)


def test_images_that_fill_the_context_are_refused_before_all_are_decoded():
    async def scenario(server: Seeing) -> None:
        parts = [image_part(png(320, 320, seed)) for seed in range(8)]
        answer = await server.post(CHAT, messages=[user(*parts)])
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert server.state.images.counts.decoded == 3

    run_seeing(scenario, context=300)


def test_too_many_that_wait_get_429(monkeypatch):
    monkeypatch.setattr(prompt_images, "MAX_WAITING_IMAGE_BYTES", 100)

    async def scenario(server: Seeing) -> None:
        await server.post(CHAT, messages=[user(image_part(BLUE))])
        process = server.state.images._process._process
        os.kill(process.pid, signal.SIGSTOP)
        first = asyncio.create_task(server.post(CHAT, messages=[user(image_part(RED))]))
        while not server.state.images._waiting:
            await asyncio.sleep(0)
        answer = await server.post(CHAT, messages=[user(image_part(RED))])
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
        assert (await server.post(CHAT, messages=[user("text")])).status_code == 200
        os.kill(process.pid, signal.SIGCONT)
        assert (await first).status_code == 200 and server.state.images._waiting == 0

    run_seeing(scenario)


def test_pixels_in_use_are_bounded():
    """Those that are only kept make room; those of running requests do, once they end."""

    async def scenario(server: Seeing) -> None:
        server.state.images._most_bytes = max(len(pixels(RED)), len(pixels(BLUE)))
        assert (await server.post(CHAT, messages=[user(image_part(RED))])).status_code == 200
        server.answers = False
        running = asyncio.create_task(server.post(CHAT, messages=[user(image_part(BLUE))]))
        while len(server.seen) < 2:
            await asyncio.sleep(0)
        answer = await server.post(CHAT, messages=[user(image_part(RED))])
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
        server.finish(server.last.request)
        assert (await running).status_code == 200
        del running
        server.answers = True
        assert (await server.post(CHAT, messages=[user(image_part(RED))])).status_code == 200

    run_seeing(scenario)


@pytest.mark.parametrize("older", [False, True])
def test_a_request_whose_own_images_are_too_many_is_not_told_to_wait(older):
    """Equal images count once. In an older turn one that is too much becomes a note."""

    async def scenario(server: Seeing) -> None:
        server.state.images._most_bytes = max(len(pixels(RED)), len(pixels(BLUE)))
        twice = [user(image_part(RED), image_part(RED))]
        assert (await server.post(CHAT, messages=twice)).status_code == 200
        turns = [user(image_part(BLUE)), {"role": "assistant", "content": "ok"}, user(image_part(RED))]
        answer = await server.post(CHAT, messages=turns if older else [user(image_part(RED), image_part(BLUE))])
        if older:
            assert answer.status_code == 200 and server.last.pixels == [pixels(RED)]
        else:
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "image_too_large")
            assert "send fewer, or smaller ones" in answer.json()["error"]["message"]

    run_seeing(scenario)


def test_a_killed_decoder_loses_nothing():
    async def scenario(server: Seeing) -> None:
        await server.post(CHAT, messages=[user(image_part(BLUE))])
        os.kill(server.state.images._process._process.pid, signal.SIGKILL)
        answer = await server.post(CHAT, messages=[user(image_part(RED))])
        assert answer.status_code == 200 and server.last.pixels == [pixels(RED)]

    run_seeing(scenario)


def test_a_client_that_leaves_is_not_waited_for():
    """Its images that were not begun are not decoded, and the next client's are."""

    async def scenario(server: Seeing) -> None:
        await server.post(CHAT, messages=[user(image_part(BLUE))])
        process = server.state.images._process._process
        os.kill(process.pid, signal.SIGSTOP)
        parts = [image_part(png(64, 64, seed)) for seed in range(5, 15)]
        leaving = asyncio.create_task(server.post(CHAT, messages=[user(*parts)]))
        while not server.state.images._process._turn.locked():
            await asyncio.sleep(0)
        leaving.cancel()
        os.kill(process.pid, signal.SIGCONT)
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert (await server.post(CHAT, messages=[user(image_part(RED))])).status_code == 200
        assert server.state.images._waiting == 0
        assert server.state.images.counts.decoded <= 3  # blue, red, and the one that was begun

    run_seeing(scenario)


def test_pixels_live_as_long_as_their_request(monkeypatch):
    """Then they are freed, unless they are kept for the next request."""
    monkeypatch.setattr(prompt_images, "RECENT_PIXEL_BYTES", 0)

    async def scenario(server: Seeing) -> None:
        server.answers = False
        running = asyncio.create_task(server.post(CHAT, messages=[user(image_part(RED))]))
        while not server.seen:
            await asyncio.sleep(0)
        [span] = server.last.request.images
        server.answers = True
        await server.post(CHAT, messages=[user(image_part(BLUE))])  # takes the place of the recent one
        assert os.path.exists(span.pixels.path)
        server.finish(server.seen[0].request)
        assert (await running).status_code == 200
        del running
        assert span.key not in server.state.images._held

    run_seeing(scenario)


def test_templates_that_show_no_images(caplog):
    """The model is served as one that reads text only."""
    template = "{% for m in messages %}<|turn|>{{ m.role }}:{{ m.content }}<|done|>{% endfor %}"

    async def scenario(server: Seeing) -> None:
        assert not server.state.chat.sees
        answer = await server.post(CHAT, messages=[user(image_part(RED))])
        assert answer.status_code == 400 and "only text is served" in answer.text

    run_seeing(scenario, template)
    assert "shows no images" in caplog.text


def test_a_template_that_writes_too_many_placeholders_is_an_error_of_the_server():
    """An image must never stand for another."""
    begins = "<|turn|>assistant:"
    twice = SEES_ALL.replace(begins, "{% if messages|length > 2 %}" + SEEN + "{% endif %}" + begins)

    async def scenario(server: Seeing) -> None:
        assert (await server.post(CHAT, messages=[user(image_part(RED))])).status_code == 200
        messages = [user("a"), {"role": "assistant", "content": "b"}, user(image_part(RED))]
        answer = await server.post(CHAT, messages=messages)
        assert answer.status_code == 500 and answer.json()["error"]["code"] == "chat_template_failed"

    run_seeing(scenario, twice)


def test_more_text_than_any_context_holds_is_refused_before_it_is_rendered():
    """A body may have 64 MiB, for images."""

    async def scenario(server: Seeing) -> None:
        answer = await server.post(CHAT, messages=[user("x" * (limits.MAX_TEXT_CHARS + 1))])
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"

    run_seeing(scenario)


def test_large_bodies_are_parsed_aside(monkeypatch):
    """Others' streams go on meanwhile."""
    threads: list[bool] = []
    real = body_module._check_values

    def noted(body: bytes) -> None:
        threads.append(threading.current_thread() is threading.main_thread())
        real(body)

    monkeypatch.setattr(body_module, "_check_values", noted)

    async def scenario(server: Seeing) -> None:
        await server.post(CHAT, messages=[user("small")])
        await server.post(CHAT, messages=[user("x" * limits.INLINE_BODY_BYTES)])
        assert threads == [True, False]

    run_seeing(scenario)
