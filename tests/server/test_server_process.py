"""Two real processes (API and engine, with the echo model): deaths, hangs, signals, start-up errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from quiet_clock import PATIENCE, QuietClock
from server_harness import ServerProcess, echo_code, free_port, plain, running, spawn, spawn_echo
from tandem.errors import EngineError
from tandem.flags.engine_config import EngineConfig
from tandem.server import launch, load_progress
from tandem.server.engine_process import load_engine
from tandem.server.launch import greeting

LONG = {"input_ids": [97], "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Its engine is loaded while the file of its name is not there."""
    folder = tmp_path_factory.mktemp("echo")
    server = spawn_echo(folder / "server.log", "load_unless_held", served_model_name=str(folder / "held"))
    with running(server):
        yield server
        assert server.stop() == 0


@pytest.fixture
def echo(shared: ServerProcess) -> ServerProcess:
    """One server for many tests: what one does to it, the next must not feel."""
    shared.wait_until_ready()
    return shared


def post(server: ServerProcess, path: str, body: dict) -> httpx.Response:
    return plain.post(server.url + path, json=body)


def ask(server: ServerProcess, text: str) -> str:
    body = {"messages": [{"role": "user", "content": text}]}
    response = post(server, "/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def wait_until(condition, seconds: float = PATIENCE) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "waited in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Neither gone nor a zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.full  # tests/faults has one of the kind in make test
def test_engine_killed(echo: ServerProcess):
    """In-flight requests end with an error within 2 s, health is red, the engine comes back, the next request works."""
    assert ask(echo, "before") == "before"
    with ThreadPoolExecutor(3) as pool:
        whole = pool.submit(post, echo, "/generate", LONG)
        streams = [pool.submit(post, echo, "/generate", LONG | {"stream": True}) for _ in range(2)]
        wait_until(lambda: echo.info()["stats"]["running"] == 3)
        pid, held = echo.engine_pid(), Path(echo.info()["served_model_name"])
        held.touch()
        os.kill(pid, signal.SIGKILL)
        killed = QuietClock()
        assert whole.result().status_code == 503
        for stream in streams:
            *_, error, done = [part for part in stream.result().text.split("\n\n") if part]
            assert done == "data: [DONE]"
            message = json.loads(error.removeprefix("data: "))["error"]["message"]
            assert "SIGKILL: perhaps memory ran out" in message
        assert killed.seconds() < 2.0
    assert echo.get("/health").status_code == 503
    refused = post(echo, "/generate", {"text": "x"})
    assert refused.status_code == 503 and refused.headers["retry-after"]
    held.unlink()
    echo.wait_until_ready()
    assert echo.engine_pid() != pid
    assert ask(echo, "after") == "after"
    assert "the engine is ready again" in echo.log.read_text()
    restarts = echo.info()["engine_restarts"]
    assert restarts >= 1
    assert f"tandem_engine_restarts_total {restarts:.1f}" in echo.get("/metrics").text


def test_a_request_that_kills_the_engine_again_and_again(echo: ServerProcess):
    for _ in range(2):
        assert post(echo, "/v1/completions", {"prompt": "crash!"}).status_code == 503
        echo.wait_until_ready()
    assert ask(echo, "still here") == "still here"


def test_a_gpu_that_stopped_working_is_a_new_engine(echo: ServerProcess):
    pid = echo.engine_pid()
    assert post(echo, "/v1/completions", {"prompt": "gpu is gone"}).status_code == 503
    echo.wait_until_ready()
    assert echo.engine_pid() != pid and ask(echo, "after") == "after"
    assert "EngineError: the GPU stopped working" in echo.log.read_text()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("watched") / "server.log"
    with running(spawn_echo(log, watchdog_timeout=5.0)) as server:
        yield server


def test_standing_still_together_is_not_being_stuck(watched: ServerProcess):
    """Ctrl+Z and fg, docker pause."""
    engine = watched.engine_pid()
    for pid in (watched.process.pid, engine):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(5.5)
    os.kill(watched.process.pid, signal.SIGCONT)
    assert watched.healthy()  # it looks at its watch, whose time is over, before the engine speaks
    os.kill(engine, signal.SIGCONT)
    assert ask(watched, "again") == "again"
    assert watched.engine_pid() == engine


def test_a_stuck_engine_is_killed(watched: ServerProcess):
    response = post(watched, "/v1/completions", {"prompt": "stuck!"})
    assert response.status_code == 503
    assert "--watchdog-timeout" in response.text and "memory" not in response.text
    watched.wait_until_ready()
    assert ask(watched, "again") == "again"
    assert "stuck" in watched.log.read_text()


def test_an_engine_comes_back_though_nobody_reads_what_it_prints(tmp_path: Path):
    """The terminal is closed, or `kt serve | head`."""
    reader, writer = os.pipe()
    server = spawn_echo(tmp_path / "server.log", "idle_engine:load_and_say", output=writer)
    os.close(writer)
    with running(server):
        assert os.read(reader, 8) == b"the plan"
        os.close(reader)
        pid = server.engine_pid()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: server.info()["engine_restarts"] == 1)
        server.wait_until_ready()
        assert server.engine_pid() != pid and ask(server, "again") == "again"


def test_sigterm_drains(tmp_path: Path):
    """Running requests finish, new ones get 503, the exit code is 0 and no engine is left."""
    gate = tmp_path / "gate"
    halting = spawn_echo(tmp_path / "server.log", loader="load_halting", served_model_name=str(gate))
    with running(halting) as server, ThreadPoolExecutor(1) as pool:
        slow = {"input_ids": [97], "sampling_params": {"max_new_tokens": 15, "ignore_eos": True}}
        answer = pool.submit(post, server, "/generate", slow)
        wait_until(lambda: server.info()["stats"]["running"] == 1)
        pid = server.engine_pid()
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not server.healthy())
        assert post(server, "/generate", slow).status_code == 503
        gate.touch()
        assert len(answer.result().json()["output_ids"]) == 15
        assert server.process.wait(timeout=PATIENCE) == 0
        wait_until(lambda: not alive(pid))


def test_long_streams_end_with_the_time_that_they_were_given(tmp_path: Path):
    """Each with an error event, and the process soon after."""
    flags = {"loader": "load_slow", "shutdown_timeout": 0.5}
    with running(spawn_echo(tmp_path / "server.log", **flags)) as server, ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(post, server, "/generate", LONG | {"stream": True}) for _ in range(8)]
        wait_until(lambda: server.info()["stats"]["running"] == 8)
        began = QuietClock()
        server.process.send_signal(signal.SIGTERM)
        for stream in streams:
            assert "the server is stopping" in stream.result().text
        assert server.process.wait(timeout=PATIENCE) == 0
        assert began.seconds() < 0.5 + 5.0
    assert "stopping; 8 requests may finish within " in server.log.read_text()


@pytest.mark.parametrize(
    ("requests", "said"),
    [(0, ""), (1, "; 1 request may finish within 2.5 s"), (2, "; 2 requests may finish within 2.5 s")],
)
def test_a_server_that_stops_says_whom_it_waits_for(requests, said):
    assert launch._who_may_finish(requests, 2.5).partition(" (a second")[0] == said


def test_two_signals_do_not_wait(tmp_path: Path):
    with (
        running(spawn_echo(tmp_path / "server.log", loader="load_slow")) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        answer = pool.submit(post, server, "/generate", LONG)
        wait_until(lambda: server.info()["stats"]["running"] == 1)
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: not server.healthy())
        server.process.send_signal(signal.SIGINT)
        assert answer.result().status_code == 503
        assert server.process.wait(timeout=PATIENCE) == 0


def test_the_engine_dies_with_its_parent_and_leaves_no_files(tmp_path: Path, monkeypatch):
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    with running(spawn_echo(tmp_path / "server.log", "idle_engine:load_prompts")) as server:
        pid = server.engine_pid()
        assert not list(folder.iterdir())
        server.process.kill()
        server.process.wait()
        wait_until(lambda: not alive(pid))


def test_an_idle_engine_sleeps(echo: ServerProcess):
    """No busy waiting: well under a tenth of one core over the idle time (a spinning loop would use all of it)."""
    ticks = os.sysconf("SC_CLK_TCK")

    def seconds_used(pid: int) -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / ticks

    ask(echo, "warm")
    pids = [echo.engine_pid(), echo.process.pid]
    before = [seconds_used(pid) for pid in pids]
    time.sleep(1.5)
    assert all(seconds_used(pid) - b < 0.15 for pid, b in zip(pids, before, strict=True))


def test_a_model_that_cannot_be_loaded_is_one_clear_line(tmp_path: Path):
    server = spawn_echo(tmp_path / "server.log", loader="echo_tokenizer:load_broken")
    assert server.process.wait(timeout=PATIENCE) == 1
    assert server.log.read_text().strip() == "error: this model is broken on purpose; give another"


def test_what_cannot_be_met_ends_as_the_plan_does(tmp_path: Path):
    """`kt serve --plan-only` ends with 2, and with the same lines."""
    server = spawn_echo(tmp_path / "server.log", loader="echo_tokenizer:load_refused")
    assert server.process.wait(timeout=PATIENCE) == 2
    reasons = "  * the echo does not fit\n  * --tp 3 is not for it\n"
    assert server.log.read_text() == f"error: 2 things stand in the way:\n{reasons}"


def test_a_tokenizer_that_cannot_be_loaded_is_one_clear_line(tmp_path: Path):
    """It is read in the API process, once the engine has said where the model is."""
    server = spawn_echo(tmp_path / "server.log", load_tokenizer="load_no_tokenizer")
    assert server.process.wait(timeout=PATIENCE) == 1
    assert "error: no tokenizer here; give one" in server.log.read_text()
    assert "Traceback" not in server.log.read_text()


def test_a_bug_while_loading_is_shown(tmp_path: Path):
    server = spawn_echo(tmp_path / "server.log", loader="echo_tokenizer:load_crashing")
    assert server.process.wait(timeout=PATIENCE) == 1
    assert "error: ZeroDivisionError: a bug while loading" in server.log.read_text()


def test_no_such_model_directory(tmp_path: Path):
    log = tmp_path / "log"
    process = spawn(["-m", "tandem.launch_server", "--model", str(tmp_path / "none"), "--port", "0"], log)
    assert process.wait(timeout=PATIENCE) != 0
    text = log.read_text()
    assert "none" in text and "Traceback" not in text


def test_a_taken_port_is_named(tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        log = tmp_path / "log"
        assert spawn(["-c", echo_code("load", port=port)], log).wait(timeout=PATIENCE) == 2
        assert f"127.0.0.1:{port}" in log.read_text() and "Traceback" not in log.read_text()


def test_a_client_that_leaves_frees_its_pages(echo: ServerProcess):
    """Streaming or not."""
    for stream in (True, False):
        wait_until(lambda: pages_are_back(echo))
        before = echo.info()["stats"]["aborted_requests"]
        body = json.dumps(LONG | {"stream": stream}).encode()
        head = b"POST /generate HTTP/1.1\r\nHost: tandem\r\nContent-Length: %d\r\n\r\n" % len(body)
        with socket.create_connection(("127.0.0.1", int(echo.url.rpartition(":")[2]))) as leaving:
            leaving.sendall(head + body)
            wait_until(lambda: echo.info()["stats"]["running"] == 1)
        wait_until(lambda before=before: echo.info()["stats"]["aborted_requests"] == before + 1)
    wait_until(lambda: pages_are_back(echo))


def pages_are_back(server: ServerProcess) -> bool:
    info = server.info()
    stats = info["stats"]
    idle = stats["running"] == stats["waiting"] == info["open_answers"] == 0
    return idle and stats["pages_free"] == stats["pages_total"]


def test_two_hundred_clients_leave_a_thousand_times(echo: ServerProcess):
    """Each after some tokens of a long stream; then many connections that say nothing."""

    async def leave(client: httpx.AsyncClient, places: asyncio.Semaphore, lines: int) -> int:
        async with places, client.stream("POST", "/generate", json=LONG | {"stream": True}) as response:
            async for _ in response.aiter_lines():
                lines -= 1
                if lines < 0:
                    break
            return response.status_code

    async def crowd() -> set[int]:
        limits, places = httpx.Limits(max_connections=200), asyncio.Semaphore(200)
        async with httpx.AsyncClient(base_url=echo.url, limits=limits, timeout=None) as client:
            return set(await asyncio.gather(*[leave(client, places, i % 7) for i in range(1000)]))

    assert asyncio.run(crowd()) == {200}
    wait_until(lambda: pages_are_back(echo))
    port = int(echo.url.rpartition(":")[2])
    with contextlib.ExitStack() as stack:
        for _ in range(500):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE))
        assert ask(echo, "still here") == "still here"


def test_health_is_answered_at_once_while_ten_megabytes_are_refused(echo: ServerProcess):
    """The best of three, and what the server's process takes alone: what a busy host does is not ours."""
    content = json.dumps({"text": "0123456789" * 1_000_000}).encode()
    longest, process = [], psutil.Process(echo.process.pid)

    def used() -> float:
        return sum(process.cpu_times()[:2])

    with httpx.Client(base_url=echo.url, timeout=PATIENCE) as client, ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            client.get("/health")
            refusing, waits = pool.submit(client.post, "/generate", content=content), [0.0]
            while not refusing.done():
                asked, before = time.monotonic(), used()
                assert client.get("/health").status_code == 200
                waits.append(min(time.monotonic() - asked, used() - before))
                time.sleep(0.002)
            assert refusing.result().json()["error"]["code"] == "context_length_exceeded"
            longest.append(max(waits))
    assert min(longest) < 0.1


def test_others_go_on_during_abuse(echo: ServerProcess):
    """A stream in progress is complete and in order while others send rubbish, 100 MB, and leave."""
    text = "0123456789" * 100
    body = {"messages": [{"role": "user", "content": text}], "stream": True}
    with plain.stream("POST", echo.url + "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        first = next(lines)
        abuse(echo)
        events = [json.loads(line[6:]) for line in (first, *lines) if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == text
    assert ask(echo, "fine") == "fine"


def abuse(echo: ServerProcess) -> None:
    assert plain.post(echo.url + "/generate", content=b" " * (100 << 20)).status_code == 413
    for body in (b"\xff" * 1000, b"[" * 100_000, b'{"text": "' + b"x" * 1_000_000 + b'"}'):
        assert plain.post(echo.url + "/generate", content=body).status_code == 400
    send_garbage(echo)


def send_garbage(server: ServerProcess) -> None:
    """Things that are not HTTP, and a request that never ends."""
    port = int(server.url.rpartition(":")[2])
    for data in (
        b"\x00\xff\n\n" * 100,
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
        b"POST /generate HT",
    ):
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as sock:
            sock.sendall(data)


@pytest.mark.parametrize(
    ("host", "url", "flag"),
    [("::1", "http://[::1]:30000", "--host ::1"), ("::", "http://[::1]:30000", "--host ::1")],
)
def test_ipv6_addresses_are_in_brackets_in_addresses_only(host: str, url: str, flag: str):
    text = greeting(EngineConfig(model="m", host=host), "m", 30000)
    assert f"curl {url}/v1" in text and f"kt chat {flag} " in text


def test_the_plan_is_printed_before_anything_is_loaded(demo_dir: Path, monkeypatch, capsys):
    def stop(*_: object, **__: object) -> None:
        raise EngineError("stop here")

    monkeypatch.setattr("tandem.engine.start.loader.models.build", stop)
    with pytest.raises(EngineError, match="stop here"):
        load_engine(EngineConfig(model=str(demo_dir)))
    assert "expert format" in capsys.readouterr().out


def test_loading_says_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr(load_progress, "LINE_SECONDS", 0.0)
    clock = iter(range(100, 200))
    monkeypatch.setattr(load_progress, "monotonic", lambda: next(clock))
    with load_progress.LoadProgress() as progress:
        progress("loading layer 3/30", 1_500_000_000, 30_000_000_000)
        progress("writing packed cache", 1_000_000_000, 3_000_000_000)
        progress("writing packed cache", 2_000_000_000, 3_000_000_000)
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"  loading layer 3/30, 1\.5 of 30\.0 GB, \d\.\d\d GB/s", lines[0])
    assert lines[1] == "  writing packed cache, 1.0 of 3.0 GB"  # its start is not known
    assert re.fullmatch(r"  writing packed cache, 2\.0 of 3\.0 GB, \d\.\d\d GB/s", lines[2])


def test_a_free_port_is_chosen_and_printed(tmp_path: Path):
    log = tmp_path / "log"
    process = spawn(["-c", echo_code("idle_engine:load_prompts", port=0)], log)
    try:
        wait_until(lambda: "kt chat --host 127.0.0.1 --port" in log.read_text())
        port = int(log.read_text().rpartition("--port ")[2].split()[0])
        assert plain.get(f"http://127.0.0.1:{port}/health").status_code == 200
    finally:
        process.terminate()
        assert process.wait(timeout=PATIENCE) == 0


def test_requests_before_the_engine_is_ready_get_503(tmp_path: Path):
    gate = tmp_path / "gate"
    server = spawn_echo(tmp_path / "server.log", loader="idle_engine:load_when_told", served_model_name=str(gate))
    try:
        wait_until(lambda: responds(server))
        statuses = {server.get(path).status_code for path in ("/health", "/v1/models", "/get_server_info")}
        assert statuses == {503}
        gate.touch()
        server.wait_until_ready()
    finally:
        assert server.stop() == 0


def responds(server: ServerProcess) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return bool(server.get("/").status_code)
    return False


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_hears_when_the_server_is_ready_and_when_it_stops(tmp_path: Path, monkeypatch, abstract: bool):
    name = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(PATIENCE)
        manager.bind(f"\0{name}" if abstract else name)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}" if abstract else name)
        if abstract:
            launch.tell_service_manager("READY=1")
            assert manager.recv(100) == b"READY=1"
            return
        server = spawn_echo(tmp_path / "log", "idle_engine:load_prompts")
        assert manager.recv(100) == b"READY=1"
        assert server.get("/health").status_code == 200
        assert server.stop() == 0
        assert manager.recv(100) == b"STOPPING=1"
    launch.tell_service_manager("READY=1")  # nobody listens: nothing happens


CLOSED = {"stdout": ">&-", "all": "<&- >&- 2>&-"}


@pytest.mark.parametrize("closed", CLOSED)
def test_a_server_needs_no_standard_files(tmp_path: Path, closed: str):
    """As `ssh host 'kt serve MODEL <&- >&- 2>&- &'` starts it."""
    port, log = free_port(), tmp_path / "server.log"
    code = (
        "from tandem.cli.standard_files import open_standard_files; open_standard_files(); "
        + echo_code("load", port=port)
    )
    (tmp_path / "serve.py").write_text(code)
    shell = f"exec {sys.executable} {tmp_path / 'serve.py'} {CLOSED[closed]}"
    process = spawn(["-c", f"import os; os.execv('/bin/sh', ['sh', '-c', {shell!r}])"], log)
    with running(ServerProcess(process, port, log)) as server:
        assert ask(server, "still here") == "still here"
        assert server.stop() == 0


@pytest.mark.parametrize("entry", ["tandem.launch_server --help", "tandem version"])
def test_each_entry_opens_what_was_closed(tmp_path: Path, entry: str):
    shell = f"exec {sys.executable} -m {entry} {CLOSED['all']}"
    log = tmp_path / "log"
    process = spawn(["-c", f"import os; os.execv('/bin/sh', ['sh', '-c', {shell!r}])"], log)
    assert process.wait(timeout=PATIENCE) == 0 and "Traceback" not in log.read_text()


@pytest.mark.parametrize("host,key,warned", [
    ("0.0.0.0", None, True), ("::", None, True), ("0.0.0.0", "s3cret", False), ("127.0.0.1", None, False),
    ("::1", None, False), ("localhost", None, False),
])  # fmt: skip
def test_a_server_that_everybody_reaches_wants_a_key(caplog, host: str, key: str | None, warned: bool):
    with launch.listen(host, 0) as sock:
        launch.warn_of_open_door(EngineConfig(model="echo", host=host, api_key=key), sock)
    assert ("everybody who reaches" in caplog.text) == warned
