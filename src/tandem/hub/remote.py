"""`Hub`: what a repository has, and its bytes from any place on. Every failure is a HubError that says what to do."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from tandem.errors import HubError
from tandem.hub.files import RemoteFile
from tandem.hub.names import HubName
from tandem.hub.snapshot import is_offline

CONNECT_SECONDS, SILENT_SECONDS = 15.0, 60.0
TRIES = 5  # in a row without a new byte
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 30.0
_BUSY = (429, 500, 502, 503, 504)
_SAFE_NAME = re.compile(r"(?!.*(^|/)\.\.?(/|$))[^/\\\0][^\\\0]*")


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A repository at one commit."""

    name: HubName
    commit: str
    files: tuple[RemoteFile, ...]

    def file(self, name: str) -> RemoteFile | None:
        return next((file for file in self.files if file.name == name), None)


class Hub:
    """huggingface.co, or what HF_ENDPOINT says. Used by several threads; `close` it."""

    def __init__(self, endpoint: str, token: str | None) -> None:
        self.endpoint = endpoint.rstrip("/")
        headers = {"User-Agent": "tandem-moe", "Accept-Encoding": "identity"}
        if token:
            headers["Authorization"] = (
                f"Bearer {token}"  # httpx leaves it out when another host is named instead
            )
        timeout = httpx.Timeout(SILENT_SECONDS, connect=CONNECT_SECONDS)
        self._client = httpx.Client(headers=headers, timeout=timeout, follow_redirects=True)

    @classmethod
    def open(cls, name: HubName) -> Hub:
        """As the environment and the login say. Raises HubError where HF_HUB_OFFLINE forbids to ask for `name`."""
        from huggingface_hub import constants, get_token

        if is_offline():
            raise HubError(
                f"{name} is not in {constants.HF_HUB_CACHE}, or not all of it, and HF_HUB_OFFLINE is set: unset it, or "
                "give a directory"
            )
        return cls(constants.ENDPOINT, get_token())

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def look(self, name: HubName) -> RemoteModel:
        """The files of a repository. Raises HubError: no such name, not allowed, nobody answers."""
        url = f"{self.endpoint}/api/models/{name.repo}/revision/{name.revision}"
        pauses = _Pauses()
        while True:
            with self._translated(name, f"{self.endpoint}"):
                response = self._client.get(url, params={"blobs": "true"})
            if response.status_code not in _BUSY or not pauses.wait(response.headers):
                break
        self._check(response, name)
        return _remote_model(name, response)

    @contextmanager
    def stream(self, model: RemoteModel, file: RemoteFile, start: int) -> Iterator[httpx.Response]:
        """The file's bytes, from `start` on if the server can (206), else all of them (200). Raises HubError, or
        httpx.TransportError, after which another try may go on."""
        url = f"{self.endpoint}/{model.name.repo}/resolve/{model.commit}/{file.name}"
        headers = {"Range": f"bytes={start}-"} if start else {}
        with self._client.stream("GET", url, headers=headers) as response:
            if response.status_code in _BUSY:
                raise httpx.ReadError(f"{self.endpoint} answers {response.status_code}")
            if response.status_code != 416:  # nothing is left from there on
                self._check(response, model.name)
            yield response

    def read(self, model: RemoteModel, file: RemoteFile, nbytes: int) -> bytes:
        """A file's first bytes. Raises HubError."""
        url = f"{self.endpoint}/{model.name.repo}/resolve/{model.commit}/{file.name}"
        headers, head = {"Range": f"bytes=0-{nbytes - 1}"}, bytearray()
        with (
            self._translated(model.name, self.endpoint),
            self._client.stream("GET", url, headers=headers) as response,
        ):
            self._check(response, model.name)
            for piece in response.iter_bytes():
                head += piece
                if len(head) >= nbytes:
                    break  # a server that knows no ranges sends the whole file
        return bytes(head[:nbytes])

    @contextmanager
    def _translated(self, name: HubName, what: str) -> Iterator[None]:
        try:
            yield
        except httpx.TransportError as error:
            raise HubError(
                f"{what} does not answer ({error or type(error).__name__}), and {name} is not here: check the network, "
                "give a directory, or another hub with HF_ENDPOINT"
            ) from error

    def _check(self, response: httpx.Response, name: HubName) -> None:
        status, reason = response.status_code, response.headers.get("X-Error-Code", "")
        if status < 400:
            return
        page = f"{self.endpoint}/{name.repo}"
        if reason == "GatedRepo":
            raise HubError(
                f"{name.repo} is gated: accept its terms at {page}, then set HF_TOKEN, or `hf auth login`"
            )
        if reason == "RevisionNotFound":
            raise HubError(f"{name.repo} has no revision {name.revision!r}: see {page}/tree/main")
        if status in (401, 403, 404):
            raise HubError(
                f"{name.repo} is no directory here, and {self.endpoint} has no such model, or does not show it to you: "
                "check the spelling; for a private model set HF_TOKEN"
            )
        raise HubError(f"{self.endpoint} answers {status} for {name}; try again later")


class _Pauses:
    """Longer and longer ones, TRIES at most."""

    def __init__(self) -> None:
        self._tries = 0

    def reset(self) -> None:
        self._tries = 0

    def wait(self, headers: Mapping[str, str] | None = None) -> bool:
        """False when there was enough waiting."""
        self._tries += 1
        if self._tries >= TRIES:
            return False
        delay = (headers or {}).get("Retry-After", "")
        seconds = float(delay) if delay.isdecimal() else FIRST_PAUSE_SECONDS * 2 ** (self._tries - 1)
        time.sleep(min(seconds, LONGEST_PAUSE_SECONDS))
        return True


def _remote_model(name: HubName, response: httpx.Response) -> RemoteModel:
    try:
        answer: dict[str, Any] = response.json()
        files = tuple(_remote_file(entry) for entry in answer["siblings"])
        commit = str(answer["sha"])
    except (ValueError, KeyError, TypeError) as error:
        raise HubError(
            f"{response.url.host} does not answer as a hub does ({error!r}); check HF_ENDPOINT"
        ) from error
    if not re.fullmatch(r"[0-9a-f]{6,64}", commit):
        raise HubError(f"{response.url.host} names the commit {commit[:80]!r}; check HF_ENDPOINT")
    return RemoteModel(name, commit, files)


def _remote_file(entry: dict[str, Any]) -> RemoteFile:
    """Names and digests become paths of the cache, so none may leave it."""
    lfs = entry.get("lfs") or {}
    digest = str(lfs.get("sha256") or lfs.get("oid") or entry["blobId"])
    name = str(entry["rfilename"])
    if not _SAFE_NAME.fullmatch(name) or not re.fullmatch(r"[0-9a-f]{40,64}", digest):
        raise ValueError(f"a file {name[:80]!r} of digest {digest[:80]!r}")
    return RemoteFile(name, int(lfs.get("size") or entry.get("size") or 0), digest)


def pauses() -> _Pauses:
    """For one file's tries."""
    return _Pauses()
