"""`hint`: what to ask for instead of a route that is not here. Clients know those of other servers, or write a base URL
with one `/v1` too many or too few."""

from __future__ import annotations

from collections.abc import Callable

NO_ADVICE = "no such route; /docs lists them"
_ONLY_TEXT = "this model writes text, and nothing else"
_OTHERS = {
    # llama.cpp's
    "/completion": "/v1/completions is here",
    "/infill": "write the model's own markers for filling in, and use /v1/completions",
    "/apply-template": "/tokenize takes messages, too",
    "/slots": "/get_server_info is here",
    "/lora-adapters": "adapters are not served",
    # OpenAI's
    "/responses/compact": "write a summary yourself, and send it as the input of /v1/responses",
    # Ollama's
    **dict.fromkeys(
        ("/api/pull", "/api/create", "/api/copy", "/api/delete", "/api/push"),
        "models are chosen and fetched at the start, by kt serve MODEL or kt serve --models FILE",
    ),
    # for models of another kind
    **dict.fromkeys(
        ("/embedding", "/embeddings", "/rerank", "/reranking", "/score", "/classify", "/pooling", "/encode",
         "/moderations", "/audio/speech", "/audio/transcriptions", "/images/generations"),
        _ONLY_TEXT,
    ),
}  # fmt: skip


def is_known(path: str) -> bool:
    """Whether another server's route has this path."""
    return path.rstrip("/").removeprefix("/v1") in _OTHERS


def hint(path: str, is_route: Callable[[str], bool]) -> str:
    """path: that is no route. is_route: whether another is."""
    path = path.rstrip("/")
    without = path.removeprefix("/v1")
    advice = _OTHERS.get(without)
    if advice is not None:  # also where there is a route that says so, or one that takes any name
        return f"no such route: {advice}"
    for other in (f"/v1{path}", without):
        if other != path and is_route(other):
            return f"no such route; {other} is here"
    return NO_ADVICE
