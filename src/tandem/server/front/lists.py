"""Lists and facts of the front's models, in the form of each dialect. Facts of a model are those of its last load."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from tandem.engine.protocol import EngineStats
from tandem.server.front.child import Child, Life
from tandem.server.info.model_files import model_files
from tandem.server.ollama.keep_alive import expiry


def card(child: Child, started_at: int) -> dict[str, Any]:
    """OpenAI's, with llama.cpp's `status`."""
    known = _first(child, "/v1/models", "data")
    status: dict[str, Any] = {"value": child.life.value}
    if child.why and child.life is Life.UNLOADED:
        status |= {"failed": True, "reason": child.why}
    bare = {"id": child.name, "object": "model", "created": started_at, "owned_by": "tandem", "root": child.entry.path}
    return bare | known | {"aliases": list(child.entry.aliases), "status": status}


def tag(child: Child, started_at: int) -> dict[str, Any]:
    """Ollama's, of /api/tags."""
    known = _first(child, "/api/ps", "models")
    files = model_files(Path(child.entry.path))
    details = {"format": files.format, "family": "", "families": [], "parameter_size": "", "quantization_level": ""}
    bare = {"size": files.nbytes, "digest": "", "details": details}
    named = {"name": child.name, "model": child.name}
    changed = datetime.fromtimestamp(started_at, UTC).isoformat()
    left_out = {"expires_at", "size_vram"}
    return {**named, "modified_at": changed, **bare, **{k: v for k, v in known.items() if k not in left_out}}


def running(child: Child) -> dict[str, Any]:
    """Ollama's, of /api/ps."""
    return _first(child, "/api/ps", "models") | {"expires_at": expiry(child.sleep.seconds_left)}


def shown(child: Child, started_at: int) -> dict[str, Any]:
    """Ollama's, of /api/show. One that was never loaded shows little."""
    if known := child.facts.get("/api/show"):
        return dict(known)
    entry = tag(child, started_at)
    return {
        "modelfile": "", "parameters": "", "template": "", "details": entry["details"], "model_info": {},
        "capabilities": ["completion", "tools"], "modified_at": entry["modified_at"],
    }  # fmt: skip


def lm_studio(child: Child) -> dict[str, Any]:
    known = _first(child, "/v1/models", "data")
    length = known.get("max_model_len", 0)
    sees = known.get("capabilities", {}).get("vision", False)
    return {
        "id": child.name, "object": "model", "type": "vlm" if sees else "llm", "publisher": "tandem", "arch": "",
        "compatibility_type": model_files(Path(child.entry.path)).format, "quantization": "",
        "state": "loaded" if child.life is Life.LOADED else "not-loaded", "max_context_length": length,
        "loaded_context_length": length if child.life is Life.LOADED else 0, "capabilities": ["tool_use"],
    }  # fmt: skip


def away(child: Child) -> bytes:
    """State of a model that is not loaded, for the page (JSON)."""
    why = child.why or f"{child.name} is not loaded; a message loads it"
    if child.life in (Life.LOADING, Life.DRAINING):
        why = f"{child.name} is {child.life.value}"
    engine = {"up": False, "why_down": why, "restarts": 0, "asleep": True, "wakes": child.loads}
    body = {
        "at": time.monotonic(), "model": child.name, "engine": engine, "open_answers": child.in_flight,
        "stats": EngineStats(), "experts": None,
    }  # fmt: skip
    return msgspec.json.encode(body)


def _first(child: Child, path: str, key: str) -> dict[str, Any]:
    entries = child.facts.get(path, {}).get(key) or [{}]
    return dict(entries[0])
