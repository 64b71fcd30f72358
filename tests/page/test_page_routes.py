"""The page's files and numbers over HTTP, without a browser."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import pytest

import echo_engine
import tandem.server.page
from quiet_clock import PATIENCE
from server_harness import LocalServer
from server_requests import error_of, run
from tandem.errors import EngineError
from tandem.flags.engine_config import EngineConfig
from tandem.server.page import live

ROOT = Path(__file__).parents[2]
STATIC = Path(tandem.server.page.__file__).parent / "static"
BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
VENDOR = STATIC / "vendor"
OWN_BYTES, VENDOR_BYTES = 100_000, 750_000


def test_browsers_get_the_page_and_others_what_they_had() -> None:
    async def scenario(server: LocalServer) -> None:
        page = await server.client.get("/", headers=BROWSER)
        assert page.headers["content-type"] == "text/html; charset=utf-8" and "<!doctype html>" in page.text
        assert (await server.client.head("/", headers=BROWSER)).status_code == 200
        for accept in ("*/*", "application/json", "text/plain"):
            plain = await server.client.get("/", headers={"accept": accept})
            assert plain.headers["content-type"] == "text/plain; charset=utf-8"
            assert plain.text.startswith("Tandem") and plain.headers["vary"] == "Accept"

    run(scenario)


def test_every_file_comes_with_a_policy_that_lets_nothing_else_in() -> None:
    async def scenario(server: LocalServer) -> None:
        files = [file for file in STATIC.rglob("*") if file.suffix]
        for path in ["/", *(f"/page/{file.relative_to(STATIC).as_posix()}" for file in files)]:
            answer = await server.client.get(path, headers=BROWSER)
            policy = answer.headers["content-security-policy"]
            assert answer.status_code == 200 and policy.startswith("default-src 'none'; script-src 'self'; ")
            assert "require-trusted-types-for 'script'" in policy
            assert "unsafe" not in policy and "frame-ancestors 'none'" in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            known = {"if-none-match": answer.headers["etag"]}
            again = await server.client.get(path, headers=BROWSER | known)
            assert again.status_code == 304 and not again.content
        for path in ("/page/routes.py", "/page/..%2froutes.py", "/page/", "/page/none.js", "/page/vendor",
                     "/page/vendor/../../routes.py", "/page/vendor/SHA256SUMS", "/page//page/main.js"):  # fmt: skip
            assert (await server.client.get(path)).status_code == 404

    run(scenario)


def test_the_page_is_small_and_complete() -> None:
    """Nothing is fetched from elsewhere, and everything that a file names is there."""
    files = {file.name: file.read_text() for file in STATIC.iterdir() if file.is_file()}
    assert sum(len(text.encode()) for text in files.values()) < OWN_BYTES
    named = set(re.findall(r'"page/([\w./-]+)"', files["index.html"]))
    for name, text in files.items():
        assert not re.search(r"""(src|href|url|import|fetch)\W{1,4}https?:""", text), name
        assert "innerHTML" not in text and "eval(" not in text and "style=" not in text, name
        named |= set(re.findall(r'(?:from|import) "\./([\w./-]+)"', text))
    libraries = {f"vendor/{file.name}" for file in VENDOR.iterdir() if file.suffix in (".js", ".css")}
    assert named == (set(files) | libraries) - {"index.html"}


def test_libraries_are_those_that_npm_gave() -> None:
    """Unchanged since `make page-vendor`, with their licences, and in fonts of one kind."""
    sums = dict(reversed(line.split("  ")) for line in (VENDOR / "SHA256SUMS").read_text().splitlines())
    files = {file.relative_to(VENDOR).as_posix(): file.read_bytes() for file in VENDOR.rglob("*") if file.is_file()}
    assert sums == {name: sha256(data).hexdigest() for name, data in files.items() if name != "SHA256SUMS"}
    assert sum(map(len, files.values())) < VENDOR_BYTES
    fonts = set(re.findall(r"url\((.*?)\)", files["katex.min.css"].decode()))
    assert fonts == {name for name in files if name.endswith(".woff2")} and len(fonts) == 20
    assert "SIL OPEN FONT LICENSE" in files["fonts/OFL.txt"].decode()
    wanted = json.loads((ROOT / "scripts/page_vendor/package.json").read_text())["dependencies"]
    licences = files["LICENSES.txt"].decode()
    assert all(f"\n{name} {version} (" in licences for name, version in wanted.items())


def test_the_documented_weight_is_the_pages() -> None:
    def kilobytes(paths: Iterable[Path]) -> str:
        return f"{sum(path.stat().st_size for path in paths) / 1000:.0f}"

    own = (file for file in STATIC.iterdir() if file.is_file())
    rows = {
        "Tandem's own": own, "fonts": VENDOR.glob("fonts/*.woff2"), "KaTeX": VENDOR.glob("katex.min.*"),
        "markdown-it": VENDOR.glob("markdown-it*"), "DOMPurify": VENDOR.glob("purify*"),
    }  # fmt: skip
    table = dict(re.findall(r"^\| ([^|]+?) \| (\d+) \|", (ROOT / "docs/page.md").read_text(), re.MULTILINE))
    assert {name: table[name] for name in rows} == {name: kilobytes(paths) for name, paths in rows.items()}


def test_with_a_key_the_page_is_open_and_its_numbers_are_not() -> None:
    async def scenario(server: LocalServer) -> None:
        get = server.client.get
        assert (await get("/", headers=BROWSER)).status_code == 200
        assert (await get("/page/main.js")).status_code == 200
        error_of(await get("/"), 401)  # as before
        error_of(await get("/tandem/live"), 401)
        error_of(await server.client.post("/", headers=BROWSER), 401)
        key = {"authorization": "Bearer s3cret"}
        assert (await get("/tandem/live", headers=key)).status_code == 200

    run(scenario, api_key="s3cret")


def test_hosts_that_are_not_allowed_get_no_page() -> None:
    async def scenario(server: LocalServer) -> None:
        for path in ("/", "/page/main.js"):
            refused = await server.client.get(path, headers=BROWSER | {"host": "evil.example"})
            assert error_of(refused, 403)["code"] == "host_not_allowed"

    run(scenario, allowed_hosts=("tandem",))


def test_live_numbers_of_a_dense_model() -> None:
    async def scenario(server: LocalServer) -> None:
        seen = (await server.client.get("/tandem/live")).json()
        assert seen["engine"] == {"up": True, "why_down": "", "restarts": 0, "asleep": False, "wakes": 0}
        assert seen["experts"] is None and seen["stats"]["pages_total"] == echo_engine.PAGES

    run(scenario)


def test_live_numbers_are_those_of_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer's tokens, side by side, also after experts have changed places."""
    monkeypatch.setattr(live, "ANSWER_SECONDS", PATIENCE)

    async def scenario(server: LocalServer) -> None:
        await server.post("/generate", text="x" * 60)
        seen = (await server.client.get("/tandem/live")).json()
        experts, stats = seen["experts"], seen["stats"]["experts"]
        assert experts["layers"] == [1, 2, 3] and [len(row) for row in experts["on_gpu"]] == [16] * 3
        both = zip(stats["gpu_tokens"], stats["cpu_tokens"], strict=True)
        assert [sum(row) for row in experts["tokens"]] == [gpu + cpu for gpu, cpu in both]
        assert sum(map(sum, experts["tokens"])) > 0 and stats["swaps"] > 0
        first = echo_engine.load_routed(EngineConfig(model="echo"), 3, 16).engine.expert_traffic()
        now = "".join(experts["on_gpu"])
        assert now != "".join(map(str, first.gpu_experts)) and now.count("1") == sum(first.gpu_experts)

    run(scenario, loaded=echo_engine.load_routed(EngineConfig(model="echo"), 3, 16))


def test_many_viewers_ask_the_engine_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "LOOK_SECONDS", 600.0)
    monkeypatch.setattr(live, "ANSWER_SECONDS", PATIENCE)  # or who asked first would go without on a busy machine

    async def scenario(server: LocalServer) -> None:
        asked, look = [], server.state.client.look_at_experts

        async def counted() -> object:
            asked.append(1)
            return await look()

        monkeypatch.setattr(server.state.client, "look_at_experts", counted)
        answers = await asyncio.gather(*(server.client.get("/tandem/live") for _ in range(50)))
        assert {answer.status_code for answer in answers} == {200}
        assert len({str(answer.json()["experts"]) for answer in answers}) == 1
        await server.client.get("/tandem/live")
        assert len(asked) == 1
        monkeypatch.setattr(live, "LOOK_SECONDS", 0.0)
        await server.client.get("/tandem/live")
        assert len(asked) == 2

    run(scenario, loaded=echo_engine.load_routed(EngineConfig(model="echo"), 2, 16))


def test_a_busy_or_dead_engine_keeps_no_viewer_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "ANSWER_SECONDS", PATIENCE)
    monkeypatch.setattr(live, "LOOK_SECONDS", 0.0)

    async def scenario(server: LocalServer) -> None:
        get = server.client.get
        known = (await get("/tandem/live")).json()["experts"]
        assert known is not None
        monkeypatch.setattr(live, "ANSWER_SECONDS", 0.05)
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def late() -> None:
            await never

        monkeypatch.setattr(server.state.client, "look_at_experts", late)
        assert (await get("/tandem/live")).json()["experts"] == known
        never.set_exception(EngineError("it has died"))
        server.state.client.detach("it has died and is being restarted")
        seen = (await get("/tandem/live")).json()
        assert seen["experts"] is None and seen["stats"]["steps"] == 0
        down = {"up": False, "why_down": "it has died and is being restarted", "restarts": 0}
        assert seen["engine"] == down | {"asleep": False, "wakes": 0}

    run(scenario, loaded=echo_engine.load_routed(EngineConfig(model="echo"), 2, 16))
