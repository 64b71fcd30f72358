"""Who may use the server: keys, where they come from, web pages, hosts, methods."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tandem
from server_harness import LocalServer
from server_requests import error_of, run
from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.server.guard.key import readable_by_others, with_key

ASK = {"text": "x"}
FOREIGN = {"origin": "https://evil.example"}


def test_pages_of_other_sites_are_kept_out() -> None:
    """A page may send text/plain to any address without asking its browser, so that alone must do nothing."""

    async def scenario(server: LocalServer) -> None:
        post = server.client.post
        for origin in ("https://evil.example", "http://localhost:3000", "null"):
            refused = await post("/generate", content='{"text": "x"}', headers={"origin": origin})
            assert error_of(refused, 403)["code"] == "origin_not_allowed"
            assert "access-control-allow-origin" not in refused.headers
        for origin in ("http://tandem", "chrome-extension://abc", "tauri://localhost"):
            assert (await post("/generate", json=ASK, headers={"origin": origin})).status_code == 200
        assert (await server.client.get("/health", headers=FOREIGN)).status_code == 200

    run(scenario)


def test_a_key_keeps_pages_out_as_well() -> None:
    async def scenario(server: LocalServer) -> None:
        error_of(await server.client.post("/generate", json=ASK, headers=FOREIGN), 401)
        key = {"authorization": "Bearer s3cret"}
        assert (await server.client.post("/generate", json=ASK, headers=FOREIGN | key)).status_code == 200

    run(scenario, api_key="s3cret")


@pytest.mark.parametrize("allowed", [("https://chat.example",), ("*",)])
def test_allowed_pages_get_what_their_browser_asks_for(allowed: tuple[str, ...]) -> None:
    async def scenario(server: LocalServer) -> None:
        ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        page = {"origin": "https://chat.example"}
        before = await server.client.options("/v1/chat/completions", headers=page | ask)
        assert before.status_code == 200 and "authorization" in before.headers["access-control-allow-headers"]
        key = {"authorization": "Bearer s3cret"}
        answer = await server.client.post("/generate", json=ASK, headers=page | key)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] in (page["origin"], "*")
        status = (await server.client.post("/generate", json=ASK, headers=FOREIGN | key)).status_code
        assert status == (200 if allowed == ("*",) else 403)

    run(scenario, api_key="s3cret", allowed_origins=allowed)


def test_only_allowed_hosts_are_answered() -> None:
    """Against names that somebody else's DNS says are here."""

    async def scenario(server: LocalServer) -> None:
        for host, status in {
            "llm.example": 200, "llm.example:30000": 200, "LLM.example": 200, "a.lan": 200, "[::1]:30000": 200,
            "evil.example": 403, "lan": 403, "": 403,
        }.items():  # fmt: skip
            response = await server.client.post("/generate", json=ASK, headers={"host": host})
            assert response.status_code == status, host
        assert (await server.client.get("/health", headers={"host": "10.0.0.7"})).status_code == 200

    run(scenario, allowed_hosts=("llm.example", "*.lan", "[::1]"))


@pytest.mark.parametrize(
    "path",
    ["/flush_cache", *(f"/{action}_expert_distribution_record" for action in ("start", "stop", "dump"))],
)
def test_no_get_changes_anything(path: str) -> None:
    async def scenario(server: LocalServer) -> None:
        refused = await server.client.get(path)
        assert error_of(refused, 405)["code"] == "method_not_allowed" and refused.headers["allow"] == "POST"

    run(scenario)


def test_the_key_comes_from_a_file_or_a_variable(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "key"
    file.write_text("from-a-file\n")
    file.chmod(0o644)
    monkeypatch.setenv("TANDEM_API_KEY", "from-a-variable")
    config = EngineConfig(model="m", api_key_file=str(file))
    assert readable_by_others(config) and with_key(config).api_key == "from-a-file"
    file.chmod(0o600)
    assert not readable_by_others(config)
    assert with_key(EngineConfig(model="m")).api_key == "from-a-variable"
    assert with_key(EngineConfig(model="m", api_key="from-a-flag")).api_key == "from-a-flag"
    monkeypatch.delenv("TANDEM_API_KEY")
    assert with_key(EngineConfig(model="m")).api_key is None


@pytest.mark.parametrize("content", [b"", b"\n", b"two\nlines\n", b"\xff\xfe\n", b"x" * 5000])
def test_a_file_that_has_no_key_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    for config in (
        EngineConfig(model="m", api_key_file=str(file)),
        EngineConfig(model="m", api_key_file=str(file.parent / "missing")),
        EngineConfig(model="m", api_key="given", api_key_file=str(file)),
        EngineConfig(model="m", api_key=""),
    ):
        with pytest.raises(ConfigError, match="key"):
            with_key(config)


def test_the_key_is_in_no_representation_and_not_in_ps() -> None:
    assert "s3cret" not in repr(EngineConfig(model="m", api_key="s3cret"))
    source = (
        "import sys; from tandem.server.guard.key import hide; key = sys.argv[2]; hide(key); "
        "print(open('/proc/self/cmdline').read().replace(chr(0), ' '), key == sys.argv[2])"
    )
    environment = {"PYTHONPATH": str(Path(tandem.__file__).parent.parent)}
    command = [sys.executable, "-c", source, "--api-key", "s3cret-kee", "--model", "m"]
    shown = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert "--api-key ********** --model m" in shown and shown.split()[-1] == "True"
