"""SGLang's /generate and /abort_request, in-process over ASGI, on the real engine with the echo model."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from echo_tokenizer import EOS
from server_harness import LocalServer
from server_requests import error_of, events, pages_are_back, run
from tandem.server.request_stream import RequestStream


def test_generate():
    async def scenario(server: LocalServer):
        body = (await server.post("/generate", text="hello", rid="mine")).json()
        assert body["text"] == "hello"
        assert body["output_ids"] == [*b"hello", EOS]
        meta = body["meta_info"]
        assert meta["id"] == "mine" and meta["finish_reason"]["type"] == "stop"
        assert meta["prompt_tokens"] == 6 and meta["completion_tokens"] == 6
        batch = (
            await server.post("/generate", text=["ab", "cd"], sampling_params={"max_new_tokens": 1})
        ).json()
        assert [b["text"] for b in batch] == ["a", "c"]
        assert batch[0]["meta_info"]["finish_reason"] == {"type": "length", "length": 1}
        ids = (await server.post("/generate", input_ids=[[97, 257], [98, 257]])).json()
        assert [b["text"] for b in ids] == ["a", "b"]
        several = (await server.post("/generate", text="ab", sampling_params={"n": 2})).json()
        assert [b["text"] for b in several] == ["ab", "ab"]

    run(scenario)


def test_generate_stream_is_cumulative():
    async def scenario(server: LocalServer):
        chunks = events((await server.post("/generate", text="hello", stream=True)).text)
        texts = [c["text"] for c in chunks]
        assert texts[-1] == "hello" and all(b.startswith(a) for a, b in itertools.pairwise(texts))
        assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "stop"
        assert all(c["meta_info"]["finish_reason"] is None for c in chunks[:-1])

    run(scenario)


def test_generate_logprobs():
    async def scenario(server: LocalServer):
        body = (
            await server.post(
                "/generate", text="abc", return_logprob=True, logprob_start_len=0, top_logprobs_num=2,
                return_text_in_logprobs=True, sampling_params={"temperature": 0},
            )
        ).json()  # fmt: skip
        meta = body["meta_info"]
        assert [entry[1] for entry in meta["input_token_logprobs"]] == [97, 98, 99, 257]
        assert meta["input_token_logprobs"][0][0] is None
        assert [entry[2] for entry in meta["output_token_logprobs"]] == ["a", "b", "c", "<256>"]
        assert len(meta["output_top_logprobs"][0]) == 2
        only_output = await server.post("/generate", text="abc", return_logprob=True)
        assert only_output.json()["meta_info"]["input_token_logprobs"] == []

    run(scenario)


SCORED = {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0, "stream": True}


def lengths(chunk: dict) -> tuple[int, ...]:
    meta = chunk["meta_info"]
    return tuple(
        len(meta[f"{side}_{kind}_logprobs"]) for side in ("input", "output") for kind in ("token", "top")
    )


def test_a_stream_tells_each_log_probability_once_and_all_at_its_end():
    async def scenario(server: LocalServer):
        whole = (await server.post("/generate", text="hello", **SCORED | {"stream": False})).json()
        *chunks, last = events((await server.post("/generate", text="hello", **SCORED)).text)
        assert lengths(whole) == (6, 6, 6, 6)
        assert last["meta_info"]["output_top_logprobs"] == whole["meta_info"]["output_top_logprobs"]
        assert lengths(last) == lengths(whole)
        assert sum(lengths(c)[0] for c in chunks) == 6 and sum(lengths(c)[3] for c in chunks) == 5
        assert chunks[1]["meta_info"]["output_token_logprobs"] == [
            whole["meta_info"]["output_token_logprobs"][1]
        ]

    run(scenario)


def test_a_stream_s_log_probabilities_take_memory_as_its_tokens_do():
    async def scenario(server: LocalServer):
        sampling = {"max_new_tokens": 600, "ignore_eos": True}
        body = SCORED | {"input_ids": [97], "sampling_params": sampling, "top_logprobs_num": 20}
        text = (await server.post("/generate", **body)).text
        scores = sum(sum(lengths(chunk)) for chunk in events(text))
        assert scores <= 2 * (600 + 600 + 1 + 1)

    run(scenario)


def test_incremental_streams_tell_everything_once():
    async def scenario(server: LocalServer):
        chunks = events((await server.post("/generate", text="hello", **SCORED)).text)
        assert len(chunks) > 2
        assert "".join(c["text"] for c in chunks) == "hello"
        assert [i for c in chunks for i in c["output_ids"]] == [*b"hello", EOS]
        assert [sum(column) for column in zip(*map(lengths, chunks), strict=True)] == [6, 6, 6, 6]
        assert chunks[-1]["meta_info"]["completion_tokens"] == 6

    run(scenario, incremental_streaming_output=True)


def test_a_reader_who_is_late_gets_one_event_for_all_that_he_missed(monkeypatch):
    async def scenario(server: LocalServer):
        stream = RequestStream.next

        async def late(self):
            outputs = await stream(self)
            while outputs and outputs[-1].finish_reason is None:
                outputs += await stream(self)
            return outputs

        monkeypatch.setattr(RequestStream, "next", late)
        [chunk] = events((await server.post("/generate", text="hello", **SCORED)).text)
        assert chunk["text"] == "hello" and lengths(chunk) == (6, 6, 6, 6)

    run(scenario)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_abort_takes_the_name_of_a_batch(path):
    async def scenario(server: LocalServer):
        ids = [[97], [98]]
        if path == "/generate":
            sampling = {"max_new_tokens": 3000, "ignore_eos": True}
            body = {"input_ids": ids, "rid": "both", "sampling_params": sampling, "stream": True}
        else:
            body = {"prompt": ids, "max_tokens": 3000, "ignore_eos": True, "stream": True}
        names = []

        async def abort_at_first(server: LocalServer) -> None:
            while len(server.state.client._routes) < 2:
                await asyncio.sleep(0.01)
            [name] = {route.stream.name for route in server.state.client._routes.values()}
            names.append(name)
            assert (await server.post("/abort_request", rid=name)).json() == {"aborted": True}

        aborting = asyncio.create_task(abort_at_first(server))
        chunks = events((await server.post(path, **body)).text)
        await aborting
        if path == "/generate":
            ended = [c["meta_info"]["finish_reason"] for c in chunks if c["meta_info"]["finish_reason"]]
            assert names == ["both"] and [e["type"] for e in ended] == ["abort", "abort"]
        else:
            assert names == [chunks[0]["id"]]
            assert [c["choices"][0]["finish_reason"] for c in chunks].count("abort") == 2
        await pages_are_back(server)

    run(scenario)


def test_abort_by_id_ends_the_stream():
    async def scenario(server: LocalServer):
        sampling = {"max_new_tokens": 3000, "ignore_eos": True}
        task = asyncio.create_task(
            server.post("/generate", input_ids=[97], rid="long", sampling_params=sampling)
        )
        while not server.state.client.stats.running:
            await asyncio.sleep(0.01)
        duplicate = await server.post("/generate", text="x", rid="long")
        assert error_of(duplicate, 400)["param"] == "rid"
        assert (await server.post("/abort_request", rid="long")).json() == {"aborted": True}
        body = (await task).json()
        assert body["meta_info"]["finish_reason"]["type"] == "abort"
        assert (await server.post("/abort_request", rid="long")).json() == {"aborted": False}
        await pages_are_back(server)

    run(scenario)
