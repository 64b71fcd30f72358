"""What clients read of the served model, in each place where one looks: its context, its size, what it sees."""

from __future__ import annotations

import json
from pathlib import Path

from server_harness import LocalServer
from server_requests import run
from tandem.server.info.model_files import ModelFiles, model_files


def test_every_place_says_the_context():
    async def scenario(server: LocalServer):
        async def get(path: str) -> dict:
            response = await server.client.get(path)
            assert response.status_code == 200, response.text
            return response.json()

        length = (await get("/get_model_info"))["context_length"]
        [card] = (await get("/v1/models"))["data"]
        assert card["context_length"] == card["max_model_len"] == length and card == await get("/v1/models/echo")
        assert card["architecture"]["input_modalities"] == ["text"]
        props = await get("/props")
        assert props["default_generation_settings"]["n_ctx"] == length and props["model_alias"] == "echo"
        assert props["modalities"] == {"vision": False, "audio": False} and props["total_slots"] > 0
        [model] = (await get("/api/v0/models"))["data"]
        assert model["max_context_length"] == model["loaded_context_length"] == length
        assert (model["id"], model["state"], model["type"]) == ("echo", "loaded", "llm")
        assert model == await get("/api/v0/models/echo")
        assert (await server.client.get("/api/v0/models/other")).status_code == 404
        [tag] = (await get("/api/tags"))["models"]
        assert tag["context_length"] == length and tag["size"] == 0  # the echo has no files

    run(scenario)


def test_sizes_are_those_of_the_files_that_are_served(tmp_path: Path):
    parts = {"model-00001-of-00002.safetensors": 30, "model-00002-of-00002.safetensors": 12, "adapter.safetensors": 5}
    for name, nbytes in parts.items():
        (tmp_path / name).write_bytes(b"x" * nbytes)
    assert model_files(tmp_path) == ModelFiles(47, "safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert model_files(tmp_path) == ModelFiles(42, "safetensors")


def test_sizes_of_gguf_files(tmp_path: Path):
    names = {"big-Q4_0-00001-of-00002.gguf": 7, "big-Q4_0-00002-of-00002.gguf": 9, "small-Q4_0.gguf": 3, "blob": 4}
    for name, nbytes in names.items():
        (tmp_path / name).write_bytes(b"x" * nbytes)
    assert model_files(tmp_path / "big-Q4_0-00001-of-00002.gguf") == ModelFiles(16, "gguf")
    assert model_files(tmp_path / "small-Q4_0.gguf") == ModelFiles(3, "gguf")
    assert model_files(tmp_path / "blob") == ModelFiles(4, "gguf")  # as Ollama names them
    assert model_files(tmp_path / "gone") == ModelFiles()
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "model.safetensors.index.json").write_text("{")
    assert model_files(broken) == ModelFiles()
