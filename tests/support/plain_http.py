"""HTTP to servers that tests start. `httpx.get` loads certificates at each call, in 17 ms: who asks again and again
until a server answers would leave it half of a core."""

from __future__ import annotations

import httpx

from quiet_clock import PATIENCE

# Each request has a connection of its own, as those of `httpx.get`.
plain = httpx.Client(verify=False, timeout=PATIENCE, limits=httpx.Limits(max_keepalive_connections=0))
