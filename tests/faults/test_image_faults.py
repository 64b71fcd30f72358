"""What goes wrong with pictures while a server serves, and what its clients see: a tiny model that sees, real processes
and signals. Each test is a line of docs/faults.md."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fault_servers import ENGINE, IMAGES, child, error_of, gone, idle, wait_until
from fault_table import Fault

from pictures import bomb, encoded, picture, png
from quiet_clock import PATIENCE
from seeing_model import save_chatting
from seeing_server import image_part, user
from server_harness import ServerProcess, plain, running, spawn_real

pytestmark = pytest.mark.timeout(600)
RESTART_SECONDS = 60.0  # on a machine that does other things as well
FLAGS = ("--dtype", "float32", "--kt-cpuinfer", "2", "--device", "cpu", "--max-total-tokens", "2048")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("faults")
    save_chatting(folder / "model")
    with running(spawn_real(folder / "model", folder / "log", *FLAGS)) as one:
        yield one


def show(server: ServerProcess, *pictures: bytes, timeout: float | httpx.Timeout = PATIENCE) -> httpx.Response:
    body: dict[str, Any] = {
        "messages": [user("See ", *map(image_part, pictures))], "max_tokens": 4, "temperature": 0,
    }  # fmt: skip
    return plain.post(server.url + "/v1/chat/completions", json=body, timeout=timeout)


def good(server: ServerProcess, picture: bytes) -> list[dict[str, Any]]:
    answer = show(server, picture)
    assert answer.status_code == 200, answer.text
    choices: list[dict[str, Any]] = answer.json()["choices"]
    return choices


def active(server: ServerProcess, count: int) -> bool:
    """Requests that are asked for, and the question itself."""
    return f"tandem_http_active {count + 1}.0" in server.get("/metrics").text


@pytest.mark.fault("Pictures that are bombs, cut off, of another format or too narrow")
def test_pictures_that_cannot_be_read(server: ServerProcess, fault: Fault) -> None:
    before = good(server, png())
    decoder = child(server, IMAGES)
    wrong = {
        "image_too_large": [bomb(), bomb(65_000, 1_000), bytes(21 << 20)],
        "invalid_image": [png(300, 300)[:9000], encoded(picture("RGB", 9, 9), "TIFF"), encoded(picture("L", 300, 1))],
    }
    for code, files in wrong.items():
        for data in files:
            fault.strikes()
            refused = show(server, data)
            assert refused.status_code == 400 and error_of(refused)["code"] == code
    fault.seen("400 `invalid_image` or `image_too_large`, which names the picture's field", 5)
    assert good(server, png()) == before
    fault.good(10)
    assert child(server, IMAGES) == decoder


@pytest.mark.fault("The process that decodes pictures is killed in the midst of one")
def test_the_decoder_is_killed(server: ServerProcess, fault: Fault) -> None:
    good(server, png(seed=1))
    decoder = child(server, IMAGES)
    decoder.suspend()  # it has the picture, and does not answer
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(good, server, png(seed=2))
        wait_until(lambda: active(server, 1))
        fault.strikes()
        decoder.kill()
        first = asked.result()
    fault.seen("nothing: another process decodes it")
    fault.good(10)
    assert child(server, IMAGES) != decoder and first == good(server, png(seed=2))


@pytest.mark.fault("A client with pictures leaves before they are decoded")
def test_a_client_leaves(server: ServerProcess, fault: Fault) -> None:
    good(server, png(seed=3))
    decoder = child(server, IMAGES)
    decoder.suspend()
    with pytest.raises(httpx.ReadTimeout):
        show(server, *[png(seed=seed) for seed in range(10, 20)], timeout=httpx.Timeout(PATIENCE, read=0.5))
    fault.strikes()
    wait_until(lambda: active(server, 0))
    decoder.resume()
    fault.seen("nothing: those that were not begun are not decoded")
    good(server, png(seed=4))
    fault.good(10)
    wait_until(lambda: idle(server))


@pytest.mark.fault("101 pictures in one request")
def test_too_many_pictures(server: ServerProcess, fault: Fault) -> None:
    small = [png(8, 8, seed) for seed in range(101)]
    assert show(server, *small[:100]).status_code == 200
    fault.strikes()
    refused = show(server, *small)
    fault.seen("400 `too_many_images`; 100 are answered", 5)
    assert refused.status_code == 400 and error_of(refused)["code"] == "too_many_images"
    good(server, small[0])
    fault.good(10)


@pytest.mark.fault("The engine's process is killed with pictures in its queue (`kill -9`)")
def test_the_engine_is_killed(server: ServerProcess, fault: Fault) -> None:
    before = good(server, png(seed=5))
    engine, decoder = child(server, ENGINE), child(server, IMAGES)
    engine.suspend()
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(show, server, png(seed=seed)) for seed in (6, 7, 8)]
        wait_until(lambda: active(server, 3))
        fault.strikes()
        engine.kill()
        answers = [each.result() for each in asked]
    fault.seen("503: “the engine process ended (SIGKILL …)”", 10)
    assert {each.status_code for each in answers} == {503} and gone([engine])
    wait_until(server.healthy)
    assert good(server, png(seed=5)) == before
    fault.good(RESTART_SECONDS)
    assert child(server, IMAGES) == decoder
