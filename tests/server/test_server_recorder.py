"""Recording expert usage over HTTP: in this process, and with real processes from recording to placing experts."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path

import idle_engine
from plans import gpu_plan
from recorded_steps import generate, tiny_engine
from server_harness import ServerProcess, local_server, plain, running, spawn_real
from tandem.checkpoint import load_model_config
from tandem.engine.expert_statistics import expert_placement
from tandem.experts.placement import load_counts, place
from tandem.experts.usage.usage_file import read_usage
from tandem.flags.engine_config import EngineConfig
from tandem.server.engine_process import LoadedEngine

ROUTES = [f"/{action}_expert_distribution_record" for action in ("start", "stop", "dump")]
START, STOP, DUMP = ROUTES


def in_a_loop(test):
    @functools.wraps(test)
    def run(*args, **kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 120))

    return run


def loaded(path: Path, directory: Path, **flags) -> LoadedEngine:
    engine = tiny_engine(path, directory, **flags)
    return LoadedEngine(engine, engine.plan, str(path), "tiny", engine.model_config.vocab)


@in_a_loop
async def test_start_stop_and_dump(tiny_models, tmp_path: Path) -> None:
    async with local_server(loaded(tiny_models["mixtral"], tmp_path)) as server:

        async def call(route: str) -> dict:
            answer = await server.client.post(route)
            assert answer.status_code == 200, answer.text
            return answer.json()

        assert await call(START) == {
            "recording": True,
            "mode": "stat",
            "passes": 0,
            "tokens": 0,
            "file": None,
        }
        sampling = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
        await server.post("/generate", input_ids=[5, 6, 7], sampling_params=sampling)
        assert await call(STOP) == {
            "recording": False,
            "mode": "stat",
            "passes": 4,
            "tokens": 6,
            "file": None,
        }
        done = await call(DUMP)
        assert Path(done["file"]).parent == tmp_path and done["tokens"] == 6
        assert read_usage(done["file"]).total.sum(1).tolist() == [6.0 * 3] * 3


@in_a_loop
async def test_refusals(tiny_models, tmp_path: Path) -> None:
    async with local_server(loaded(tiny_models["mixtral"], tmp_path / "folder"), api_key="s3cret") as server:
        server.client.headers["Authorization"] = "Bearer s3cret"
        for route in (STOP, DUMP):
            answer = await server.client.post(route)
            assert answer.status_code == 400
            assert START in answer.json()["error"]["message"]
        (tmp_path / "folder").write_text("in the way")
        answer = await server.client.post(START)
        assert answer.status_code == 500 and answer.json()["error"]["code"] == "not_recorded"
        assert "--expert-distribution-recorder-dir" in answer.json()["error"]["message"]
        assert (await server.client.get("/health_generate")).status_code == 200
        del server.client.headers["Authorization"]
        for route in ROUTES:
            assert (await server.client.post(route)).status_code == 401
            assert (await server.client.delete(route)).status_code == 401


@in_a_loop
async def test_a_disk_that_fills_up_fails_the_dump_alone(tiny_models, tmp_path: Path) -> None:
    async with local_server(loaded(tiny_models["mixtral"], tmp_path / "folder")) as server:
        one = {"max_new_tokens": 1, "ignore_eos": True}
        await server.client.post(START)
        await server.post("/generate", input_ids=[5, 6], sampling_params=one)
        (tmp_path / "folder").rmdir()
        (tmp_path / "folder").write_text("in the way")
        assert (await server.client.post(DUMP)).status_code == 500
        answer = await server.post("/generate", input_ids=[5, 6, 7], sampling_params=one)
        assert answer.status_code == 200
        (tmp_path / "folder").unlink()
        done = (await server.client.post(DUMP)).json()
        assert read_usage(done["file"]).tokens == 5  # the failed dump's are in it, too


@in_a_loop
async def test_an_engine_without_experts_and_one_that_dies() -> None:
    async with local_server() as server:
        answer = await server.client.post(START)
        assert answer.status_code == 400 and "no routed experts" in answer.text
    engine = idle_engine.load(EngineConfig(model="idle"))
    async with local_server(engine) as server:
        calls = [asyncio.create_task(server.client.post(route)) for route in (START, DUMP)]
        await asyncio.sleep(0.05)
        assert not any(call.done() for call in calls)
        assert (await server.client.get("/get_server_info")).status_code == 200
        server.state.client.detach("the engine is gone")
        for call in calls:
            assert (await call).status_code == 503
        assert (await server.client.post(START)).status_code == 503


def value_of(metrics: str, name: str) -> float:
    (line,) = (line for line in metrics.splitlines() if line.startswith(name + " "))
    return float(line.split()[-1])


@in_a_loop
async def test_metrics_of_the_experts(tiny_models, tmp_path: Path) -> None:
    """Three tokens at once, then three one by one: so often each chosen expert is read."""
    engine = tiny_engine(tiny_models["glm4_moe"], tmp_path, expert_distribution_recorder_mode="per_token")
    config = engine.model_config
    async with local_server(LoadedEngine(engine, engine.plan, "x", "tiny", 263)) as server:
        await server.client.post(START)
        sampling = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
        await server.post("/generate", input_ids=[5, 6, 7], sampling_params=sampling)
        record = read_usage((await server.client.post(DUMP)).json()["file"])
        metrics = (await server.client.get("/metrics")).text
        stats = (await server.client.get("/get_server_info")).json()["stats"]["experts"]
    assert stats["layers"] == list(config.moe_layers) == [1, 2]
    assert stats["cpu_tokens"] == [6 * config.moe.router.top_k] * 2 and stats["gpu_tokens"] == [0, 0]
    expert_bytes = engine._meter._usage.expert_bytes.tolist()
    assert min(expert_bytes) >= 3 * 28 * 72 * 4
    for i, layer in enumerate(config.moe_layers):
        reads = int((record.counts[:, i] > 0).sum())
        assert stats["cpu_bytes"][i] == reads * expert_bytes[i]
        for side, tokens, nbytes in (
            ("cpu", 6 * config.moe.router.top_k, reads * expert_bytes[i]),
            ("gpu", 0, 0),
        ):
            where = f'{{layer="{layer}",side="{side}"}}'
            assert value_of(metrics, "tandem_routed_tokens_total" + where) == tokens
            assert value_of(metrics, "tandem_expert_read_bytes_total" + where) == nbytes
    for name in (
        "expert_hit_rate",
        "expert_swaps_total",
        "expert_swap_wait_seconds_total",
        "handoff_posts_total",
        "handoff_wait_seconds_total",
    ):
        assert value_of(metrics, f"tandem_{name}") == 0


@in_a_loop
async def test_a_dense_model_has_no_metrics_of_experts() -> None:
    async with local_server() as server:
        assert "routed_tokens" not in (await server.client.get("/metrics")).text
        assert (await server.client.get("/get_server_info")).json()["stats"]["experts"] is None


def ask(server: ServerProcess, text: str) -> None:
    sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    body = {"text": text, "sampling_params": sampling}
    assert plain.post(server.url + "/generate", json=body, timeout=60).status_code == 200


def test_from_a_recording_to_a_placement(tiny_models, tmp_path: Path) -> None:
    """A workload is recorded and written by a real server; its file places the experts of the next one."""
    model, directory = tiny_models["glm4_moe"], tmp_path / "statistics"
    flags = ["--kt-cpuinfer", "1", "--max-total-tokens", "256", "--device", "cpu", "--skip-server-warmup"]
    recording = ["--expert-distribution-recorder-mode", "per_pass", "--record-kt-gpu-expert-distribution"]
    recording += ["--expert-distribution-recorder-dir", str(directory)]
    with running(spawn_real(model, tmp_path / "server.log", *flags, *recording)) as server:
        for route in (START, None, STOP):
            if route is None:
                ask(server, "What is recorded, and what is not?")
            else:
                assert plain.post(server.url + route, timeout=60).json()["recording"] == (route == START)
        file = plain.post(server.url + DUMP, timeout=60).json()["file"]
    config, record = load_model_config(model), read_usage(file)
    layers, experts = len(config.moe_layers), config.moe.router.num_experts
    assert record.counts.shape == (record.passes, layers, experts) and record.model == model.name
    assert record.gpu_experts.shape == record.counts.shape and not record.gpu_experts.any()
    counts = load_counts(file, layers, experts, config.moe_layers, len(config.layers))
    assert counts.sum(1).tolist() == [float(record.tokens * config.moe.router.top_k)] * layers
    hottest = place("frequency", layers, experts, layers, counts).gpu_experts
    assert counts[hottest].min() >= counts[~hottest].max()


def test_the_engine_places_experts_as_they_were_recorded(tiny_models, tmp_path: Path) -> None:
    """What a GPU's side of the engine makes of such a file."""
    engine = tiny_engine(tiny_models["mixtral"], tmp_path)
    config = engine.model_config
    engine.record_experts("start").result(120)
    generate(engine, list(range(30)))
    file = engine.record_experts("dump").result(120).file
    gpu = gpu_plan(4, placement="frequency", statistics=file)
    placement, counts = expert_placement(gpu, config), read_usage(file).total
    assert placement.total == 4
    assert counts[placement.gpu_experts].min() >= counts[~placement.gpu_experts].max()
