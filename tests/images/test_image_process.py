"""The process that decodes: bounded, replaced, and nothing is lost when it ends."""

from __future__ import annotations

import base64
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pictures import bomb, png
from tandem.engine.images import process as image_process
from tandem.engine.images.limits import WORKER_BYTES
from tandem.engine.images.process import ImageProcess
from tandem.errors import EngineError, RequestError
from tandem.spec.vision import Processor


@pytest.fixture
def images() -> Iterator[ImageProcess]:
    one = ImageProcess(Processor())
    yield one
    one.close()


def read(images: ImageProcess, data: bytes) -> image_process.Resized:
    return images.resized(data, "here", most_tokens=1024)


def pid(images: ImageProcess) -> int:
    read(images, png(8, 8))
    assert images._process is not None
    return images._process.pid


def test_the_system_ends_it_before_the_engine(images):
    """Where memory runs out (`oom_score_adj`)."""
    assert Path(f"/proc/{pid(images)}/oom_score_adj").read_text().strip() == "1000"


def test_a_file_and_its_base64_have_the_same_pixels(images):
    plain = read(images, png())
    coded = images.resized(base64.b64encode(png()), "here", most_tokens=1024, base64=True)
    assert plain == coded and len(plain.pixels) == plain.decoded.height * plain.decoded.width * 3


def test_most_tokens_bound_the_size(images):
    decoded = images.resized(png(1000, 800), "here", most_tokens=256).decoded
    assert decoded.height * decoded.width <= 256 * 32 * 32


def test_an_interrupt_leaves_no_answer_for_the_next_image(images, monkeypatch):
    def interrupted(_of) -> bytes:
        raise KeyboardInterrupt

    expected = read(images, png(64, 320))
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(image_process, "receive_frame", interrupted)
        read(images, png(640, 320))
    assert read(images, png(64, 320)) == expected


def test_an_error_names_the_field(images):
    with pytest.raises(RequestError, match=r"^messages\[0\]: the image is of no format") as caught:
        images.resized(b"no", "messages[0]", most_tokens=1024)
    assert (caught.value.param, caught.value.code) == ("messages[0]", "invalid_image")


def test_a_process_that_was_killed_is_replaced_and_the_image_is_decoded(images):
    expected = read(images, png())
    os.kill(pid(images), signal.SIGKILL)
    assert read(images, png()) == expected


def test_a_process_that_dies_twice_is_named_and_the_next_image_is_decoded(images, monkeypatch):
    """The second one dies in the midst of the image, as a decoder with a fault does."""
    expected, begun = read(images, png()), images._connected

    def killed():
        ours = begun()
        images._process.send_signal(signal.SIGKILL)
        images._process.wait()
        return ours

    monkeypatch.setattr(images, "_connected", killed)
    with pytest.raises(EngineError, match="here: the decoder of images ended twice .SIGKILL"):
        read(images, png())
    monkeypatch.undo()
    assert read(images, png()) == expected


def test_a_process_that_hangs_is_killed(images):
    first = pid(images)
    assert images._socket.gettimeout() == image_process.WORKER_SECONDS
    images._socket.settimeout(0.2)
    os.kill(first, signal.SIGSTOP)
    with pytest.raises(RequestError, match="takes too long") as caught:
        read(images, png())
    assert caught.value.code == "image_too_large" and not Path(f"/proc/{first}").exists()
    assert read(images, png()).pixels


def test_closing_ends_an_image_that_is_being_decoded(images):
    os.kill(pid(images), signal.SIGSTOP)
    said: list[str] = []

    def ask() -> None:
        try:
            read(images, png())
        except EngineError as error:
            said.append(str(error))

    asking = threading.Thread(target=ask)
    asking.start()
    while not images._turn.locked():
        time.sleep(0.001)
    images.close()
    asking.join()
    assert said == ["here: the decoder of images ended twice (the server is stopping); send this one as PNG"]
    assert images._process is None


def test_it_is_bounded_in_memory_and_opens_no_files(images):
    limits = Path(f"/proc/{pid(images)}/limits").read_text().splitlines()
    soft = {line[:25].strip(): line[26:].split()[0] for line in limits}
    assert soft["Max address space"] == str(WORKER_BYTES)
    assert soft["Max open files"] == soft["Max file size"] == soft["Max core file size"] == "0"
    assert int(soft["Max cpu time"]) <= 23


def test_a_bomb_is_refused_by_its_head(images):
    with pytest.raises(RequestError, match="20000 x 20000 pixels") as caught:
        read(images, bomb())
    assert caught.value.code == "image_too_large"


def test_the_largest_image_fits_its_memory(images):
    """8,000 x 8,000 transparent pixels."""
    from PIL import Image

    from pictures import encoded

    data = encoded(Image.new("RGBA", (8000, 8000), (9, 9, 9, 9)), "PNG", compress_level=1)
    assert read(images, data).decoded.source_pixels == 64_000_000
