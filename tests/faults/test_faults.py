"""What goes wrong while a server serves, and what its clients see: real processes and signals, one server for many.

Each test is a line of docs/faults.md. The longer ones are in test_faults_long.py, those of a GPU in test_gpu_faults.py.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import tokenizers
from fault_servers import (
    ENGINE,
    LONG,
    TEMPLATES,
    answer,
    ask,
    body,
    child,
    error_of,
    family,
    fault_model,
    gone,
    good_answer,
    idle,
    long_answers,
    spawn_kt,
    wait_until,
)
from fault_table import Fault
from faulty_engine import command

from quiet_clock import PATIENCE
from server_harness import ServerProcess, plain
from tandem.experts.usage.usage_file import read_usage

pytestmark = pytest.mark.timeout(600)
CLIENTS = 256
RESTART_SECONDS = 60.0  # on a machine that does other things as well
SPARE_BYTES = 64 << 20


class Place:
    """The model, and the server that the tests share until one of them ends it."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder, self._number = model, folder, 0
        self._waits = folder / "engines-wait"
        self.server = self.start()

    def start(self, port: int | None = None) -> ServerProcess:
        self._number += 1
        log = self.folder / f"{self._number}.log"
        flags = "--shutdown-timeout", "1", "--expert-distribution-recorder-dir", str(self.folder / "records")
        waits = {"FAULTY_ENGINE_WAITS": str(self._waits)}
        self.server = spawn_kt(self.model, log, *flags, port=port, faulty=True, **waits)
        return self.server

    @contextmanager
    def no_new_engine(self) -> Iterator[None]:
        """None is loaded meanwhile."""
        self._waits.touch()
        try:
            yield
        finally:
            self._waits.unlink()


@pytest.fixture(scope="module")
def place(tiny_models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("faults")
    model = fault_model(tiny_models["qwen3_moe"], folder / "model")
    give_up_on_many_x(model / "tokenizer.json")
    forget_a_letter(model / "tokenizer.json")
    found = Place(model, folder)
    yield found
    if found.server.process.poll() is None:
        found.server.stop()


def give_up_on_many_x(file: Path) -> None:
    """A rule that takes forever on a text of `x` alone, so that the library panics; it changes no other text."""
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    rule = tokenizers.pre_tokenizers.Split(tokenizers.Regex("(x+x+)+y"), "isolated")
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([rule, tokenizer.pre_tokenizer])
    tokenizer.save(str(file))


def forget_a_letter(file: Path) -> None:
    """Byte 0 is in the vocabulary no more, and the token for unknown ones neither: the library raises an Exception."""
    tokenizer = json.loads(file.read_text())
    del tokenizer["model"]["vocab"]["\u0100"]
    tokenizer["model"]["unk_token"] = "<unk>"
    file.write_text(json.dumps(tokenizer))


@pytest.fixture
def server(place: Place) -> ServerProcess:
    place.server.wait_until_ready()
    return place.server


@pytest.fixture(scope="module")
def expected(place: Place) -> list[int]:
    """The greedy answer of a server that nothing has happened to."""
    place.server.wait_until_ready()
    return answer(place.server)


@pytest.mark.fault("The engine's process is killed (`kill -9`, or the kernel's when memory runs out)")
def test_the_engine_is_killed(place: Place, server: ServerProcess, expected: list[int], fault: Fault) -> None:
    engine = child(server, ENGINE)
    with place.no_new_engine():
        with long_answers(server, 4) as asked:
            fault.strikes()
            engine.kill()
            errors = [one.result() for one in asked]
            fault.seen("503, in a stream an error event: “the engine process ended (SIGKILL …)”; `/health` is 503", 2)
        for response in errors:
            assert "SIGKILL: perhaps memory ran out" in error_of(response)["message"]
        assert {response.status_code for response in errors} == {200, 503}
        assert not server.healthy()
    assert good_answer(server) == expected
    fault.good(RESTART_SECONDS)
    assert server.info()["engine_restarts"] == 1
    wait_until(lambda: idle(server))


@pytest.mark.fault("A task of the workers' pool throws")
def test_an_exception_in_the_pool(server: ServerProcess, expected: list[int], fault: Fault) -> None:
    """The requests of its step fail; the process and its workers go on."""
    engine = child(server, ENGINE)
    with long_answers(server, 2) as asked:
        fault.strikes()
        refused = [ask(server, ids=command("inpool")), *(one.result() for one in asked)]
        fault.seen("the requests of that step get 503, or an error event, with what was thrown", 5)
    assert all("became shorter while it was read" in error_of(each)["message"] for each in refused)
    assert answer(server) == expected
    fault.good(5)
    assert child(server, ENGINE) == engine
    wait_until(lambda: idle(server))


@pytest.mark.fault("Memory runs out in a step (`RLIMIT_AS`)")
def test_memory_runs_out_in_a_step(server: ServerProcess, expected: list[int], fault: Fault) -> None:
    """The step that wants it fails; small ones go on while there is no more, and all once there is."""
    engine = child(server, ENGINE)
    unlimited = engine.rlimit(psutil.RLIMIT_AS)
    engine.rlimit(psutil.RLIMIT_AS, (engine.memory_info().vms + SPARE_BYTES, unlimited[1]))
    try:
        fault.strikes()
        refused = ask(server, ids=command("memory"))
        fault.seen("the requests of that step get 503: “not enough memory”; smaller steps go on meanwhile", 5)
        assert refused.status_code == 503 and "not enough memory" in error_of(refused)["message"]
        assert answer(server) == expected
        fault.good(5)
    finally:
        engine.rlimit(psutil.RLIMIT_AS, unlimited)
    assert ask(server, ids=command("memory")).status_code == 200
    assert child(server, ENGINE) == engine
    wait_until(lambda: idle(server))


@pytest.mark.fault("The process of the chat template is killed while it renders")
def test_the_chat_templates_process_is_killed(server: ServerProcess, fault: Fault) -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}

    def say() -> httpx.Response:
        return plain.post(server.url + "/v1/chat/completions", json=chat, timeout=60)

    before = say().json()["choices"]
    templates = child(server, TEMPLATES)
    templates.suspend()  # it has the prompt, and does not answer
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(say)
        wait_until(lambda: "tandem_http_active 2.0" in server.get("/metrics").text)
        fault.strikes()
        templates.kill()
        refused = asked.result()
    fault.seen("500 `chat_template_failed`; prompts without a template go on", 2)
    assert refused.status_code == 500 and error_of(refused)["code"] == "chat_template_failed"
    assert say().json()["choices"] == before
    fault.good(10)
    assert child(server, TEMPLATES) != templates


@pytest.mark.fault("The tokenizer fails on a text (an error of its library, or a panic)")
def test_the_tokenizer_fails(server: ServerProcess, expected: list[int], fault: Fault) -> None:
    """In the server's own process, on the event loop for a short text and on a thread for a long one."""

    def said(text: str) -> httpx.Response:
        asked = {"text": text, "sampling_params": {"max_new_tokens": 4}}
        return plain.post(server.url + "/generate", json=asked, timeout=60)

    engine, processes = child(server, ENGINE), family(server)
    with long_answers(server, 2) as others:
        fault.strikes()
        engine.suspend()  # or these would have ended on a machine whose server is slow just then
        refused = [said("a\0"), said("x" * 40), said("word " * 805 + "x" * 40)]
        engine.resume()
        fault.seen("400: “the model's tokenizer cannot read this text”; the others go on", 20)
        wait_until(lambda: server.info()["stats"]["running"] == 2)
        plain.post(server.url + "/abort_request", json={"abort_all": True}, timeout=60).raise_for_status()
    for response in refused:
        assert response.status_code == 400 and "cannot read this text" in error_of(response)["message"]
    assert [one.result().status_code for one in others] == [200, 200]
    assert said("xylophone").status_code == 200 and answer(server) == expected
    fault.good(60)
    assert child(server, ENGINE) == engine and family(server) == processes
    wait_until(lambda: idle(server))


@pytest.mark.fault("The disk is full: recorded expert usage (`RLIMIT_FSIZE`)")
def test_a_full_disk_costs_a_record_only(place: Place, server: ServerProcess, fault: Fault) -> None:
    """And nothing that was recorded: the next dump has it."""
    engine = child(server, ENGINE)

    def record(what: str) -> httpx.Response:
        return plain.post(f"{server.url}/{what}_expert_distribution_record", timeout=60)

    unlimited = engine.rlimit(psutil.RLIMIT_FSIZE)
    assert record("start").status_code == 200
    answer(server)
    engine.rlimit(psutil.RLIMIT_FSIZE, (100, unlimited[1]))
    try:
        fault.strikes()
        refused = record("dump")
        fault.seen("500 `not_recorded`, which names the folder; the next dump has everything", 5)
    finally:
        engine.rlimit(psutil.RLIMIT_FSIZE, unlimited)
    assert refused.status_code == 500 and str(place.folder / "records") in error_of(refused)["message"]
    done = record("dump").json()
    fault.good(5)
    assert read_usage(done["file"]).tokens == 6
    assert list((place.folder / "records").iterdir()) == [Path(done["file"])]
    assert record("stop").status_code == 200


@pytest.mark.fault("A second server is given the same port")
def test_a_port_that_is_taken(place: Place, server: ServerProcess, expected: list[int], fault: Fault) -> None:
    port = int(server.url.rpartition(":")[2])
    fault.strikes()
    second = spawn_kt(place.model, place.folder / "second.log", port=port)
    assert second.process.wait(PATIENCE) == 2
    fault.seen("it ends at once: “cannot listen on …; try another --port or --host”; the first goes on", 30)
    assert "(Address already in use); try another --port" in second.log.read_text()
    assert answer(server) == expected
    fault.good(30)


@pytest.mark.full
@pytest.mark.fault("256 clients at once")
def test_256_clients(server: ServerProcess, fault: Fault) -> None:
    """Each gets the answer that it gets alone."""
    first = [i % 90 for i in range(CLIENTS)]
    alone = {i: ask(server, 8, first=i).json()["output_ids"] for i in set(first)}

    async def everybody() -> list[list[int]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=300, limits=limits) as http:

            async def one(i: int) -> list[int]:
                answered = await http.post(server.url + "/generate", json=body(8, first=i))
                assert answered.status_code == 200, answered.text
                return list(answered.json()["output_ids"])

            return await asyncio.gather(*map(one, first))

    fault.strikes()
    assert asyncio.run(everybody()) == [alone[i] for i in first]
    fault.seen("nothing: 64 run, the others wait; each gets the answer that it gets alone")
    fault.good(120)
    wait_until(lambda: idle(server))


@pytest.mark.fault("The server's process is killed (`kill -9`)")
def test_the_server_is_killed(place: Place, server: ServerProcess, expected: list[int], fault: Fault) -> None:
    """Nothing that it has started lives on, and its port can be used at once."""
    port, processes = int(server.url.rpartition(":")[2]), family(server)
    assert len(processes) >= 2
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, server, LONG, stream=True)
        wait_until(lambda: server.info()["stats"]["running"] == 1)
        fault.strikes()
        server.process.kill()
        with pytest.raises(httpx.TransportError):
            asked.result()
        fault.seen("the connection ends; no process is left, and the port is free at once", 2)
    server.process.wait()
    socket.create_server(("127.0.0.1", port)).close()
    wait_until(lambda: gone(processes))
    assert good_answer(place.start(port)) == expected
    fault.good(RESTART_SECONDS)


@pytest.mark.fault("SIGTERM while streams are long (`--shutdown-timeout 1`)")
def test_sigterm_while_streams_are_long(server: ServerProcess, fault: Fault) -> None:
    """Last: the server ends here, within 5 seconds after the time that it gives them."""
    processes = family(server)
    with long_answers(server, 16) as asked:
        fault.strikes()
        server.process.send_signal(signal.SIGTERM)
        errors = [error_of(one.result()) for one in asked]
        assert server.process.wait(PATIENCE) == 0
        fault.seen("503, in a stream an error event: “the server is stopping”; exit code 0", 1 + 5)
    assert {error["message"] for error in errors} == {"the server is stopping"}
    wait_until(lambda: gone(processes))
