"""`Origins`: which web pages may use the server, and by which names it may be called."""

from __future__ import annotations

from fnmatch import fnmatchcase
from urllib.parse import urlsplit

from starlette.types import Scope

from tandem.flags.engine_config import EngineConfig
from tandem.server.errors import ApiError

ANY = "*"


class Origins:
    """Browsers say where a page comes from (Origin) and what it called (Host); nobody else can be kept out by that."""

    def __init__(self, config: EngineConfig) -> None:
        self._hosts = config.allowed_hosts
        self._origins = config.allowed_origins
        self._keyed = config.api_key is not None

    def check(self, scope: Scope) -> None:
        """Raises ApiError 403."""
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if self._hosts is not None and not _matches(host, self._hosts):
            message = f"the host {host[:100]!r} is not one of --allowed-hosts"
            raise ApiError(403, message, kind="permission_error", code="host_not_allowed")
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        if origin and not self._welcome(origin, host):
            message = f"pages of {origin[:100]} may not use this server; start it with --allowed-origins {origin[:100]}"
            raise ApiError(403, message, kind="permission_error", code="origin_not_allowed")

    def _welcome(self, origin: str, host: str) -> bool:
        """Without a list, pages of other sites are kept out where there is no key that they would have to know."""
        parts = urlsplit(origin)
        if parts.netloc == host:
            return True
        if self._origins is not None:
            return ANY in self._origins or origin in map(str.lower, self._origins)
        ours = parts.scheme not in ("http", "https") and origin != "null"  # extensions and desktop programs
        return ours or self._keyed


def _matches(host: str, patterns: tuple[str, ...]) -> bool:
    """`host` may end in a port."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    lowered = [pattern.lower() for pattern in patterns]
    return name in lowered or host in lowered or any(fnmatchcase(name, pattern) for pattern in lowered)
