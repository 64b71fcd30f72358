"""Dockerfile, compose.yaml and docs/tandem.service: flags that exist, times that fit, an image that answers."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.flags.engine_config import FLAGS, EngineConfig

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
UNIT = (ROOT / "docs" / "tandem.service").read_text()
PAGE = (ROOT / "docs" / "containers.md").read_text()
KT = Path(sys.prefix, "bin", "kt")

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing"
)
absent = [each for each in ("buildah", "mmdebstrap", "curl") if shutil.which(each) is None]


def seconds(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(s|m|min|)", text).groups()  # type: ignore[union-attr]
    return int(number) * (60 if unit.startswith("m") else 1)


def unit_problems(folder: Path, text: str) -> tuple[int, list[str]]:
    file = folder / "tandem.service"
    file.write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True)
    return done.returncode, [line for line in done.stderr.splitlines() if "tandem" in line]


@needs_systemd
def test_the_unit_is_valid(tmp_path: Path) -> None:
    program = KT if KT.is_file() else sys.executable
    assert unit_problems(tmp_path, UNIT.replace("/opt/tandem/bin/kt", str(program))) == (0, [])


@needs_systemd
@pytest.mark.parametrize(
    ("old", "new"), [("LimitNOFILE", "LimitNOFLE"), ("30min", "half an hour"), ("kt", "kn")]
)
def test_faults_of_a_unit_are_seen(tmp_path: Path, old: str, new: str) -> None:
    code, problems = unit_problems(tmp_path, UNIT.replace(old, new))
    assert code or problems


def serve_lines() -> list[list[str]]:
    image = json.loads(re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.M)[-1])
    unit = re.findall(r"^ExecStart=\S+/kt (.*)$", UNIT, re.M)[0].split()
    return [image, unit, *(service["command"] for service in COMPOSE["services"].values())]


def test_flags_exist() -> None:
    known = {spelling for flag in FLAGS for spelling in flag.spellings}
    for command, model, *words in serve_lines():
        assert command == "serve" and not model.startswith("-")
        assert {word for word in words if word.startswith("--")} <= known


def test_running_answers_have_time_to_end() -> None:
    stops = [re.findall(r"^TimeoutStopSec=(.*)$", UNIT, re.M)[0]]
    stops += [service["stop_grace_period"] for service in COMPOSE["services"].values()]
    assert min(map(seconds, stops)) > EngineConfig(model="m").shutdown_timeout


def test_compose_uses_what_the_dockerfile_has() -> None:
    targets = set(re.findall(r"^FROM .* AS (\w+)$", DOCKERFILE, re.M))
    volumes = json.loads(re.findall(r"^VOLUME (.*)$", DOCKERFILE, re.M)[0])
    for name, service in COMPOSE["services"].items():
        assert service["build"]["target"] == name and name in targets
        assert service["image"] == f"tandem:{name}" and service["profiles"] == [name]
        assert [mount.partition(":")[2] for mount in service["volumes"]] == volumes
        assert {mount.partition(":")[0] for mount in service["volumes"]} == set(COMPOSE["volumes"])
        assert service["cap_add"] == ["SYS_NICE"] and service["read_only"] and service["tmpfs"] == ["/tmp"]
    assert (
        "gpu"
        in COMPOSE["services"]["cuda"]["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"]
    )


def test_every_image_ends_as_another_user() -> None:
    final = {
        re.search(r"AS (\w+)", stage)[1]: stage
        for stage in re.split(r"^(?=FROM )", DOCKERFILE, flags=re.M)[2:]
    }  # type: ignore[index]
    assert set(final) == {"cpu", "cuda"}
    assert all(stage.rstrip().split("\n\n")[0].endswith("USER 1000") for stage in final.values())


def test_caches_are_in_volumes() -> None:
    places = dict(
        re.findall(r"(HF_HOME|TANDEM_CACHE_DIR|TRITON_CACHE_DIR|CUDA_CACHE_PATH)=(\S+)", DOCKERFILE)
    )
    assert len(places) == 4 and all(re.match("/(models|cache)/", place) for place in places.values())
    assert all(place in PAGE for place in places.values())


def test_the_page_has_what_it_names() -> None:
    """Targets of make, profiles of the compose file, and every flag that `kt doctor` names."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"^make ([a-z-]+)", PAGE, re.M)) == {"wheel", "image"} <= targets
    assert set(re.findall(r"--profile (\w+)", PAGE)) == set(COMPOSE["services"])
    doctor = (ROOT / "src/tandem/cli/doctor_container.py").read_text()
    named = set(re.findall(r"docker run (--[\w-]+)", doctor))
    assert len(named) == 6 and named <= set(re.findall(r"--[\w-]+", PAGE))


@pytest.mark.skipif(shutil.which("hadolint") is None and not (KT.parent / "hadolint").exists(),
                    reason="hadolint is missing: make lint installs it")  # fmt: skip
def test_every_ignored_rule_would_speak(tmp_path: Path) -> None:
    ignored = set(yaml.safe_load((ROOT / ".hadolint.yaml").read_text())["ignored"])
    (tmp_path / "none.yaml").write_text("ignored: []\n")
    program = shutil.which("hadolint") or KT.parent / "hadolint"
    command = [program, "--config", tmp_path / "none.yaml", "--format", "json", ROOT / "Dockerfile"]
    said = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)
    assert {each["code"] for each in said} == ignored


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.full
@pytest.mark.timeout(2400)
@pytest.mark.skipif(bool(absent), reason=f"missing, for an image: {', '.join(absent)}")
def test_the_cpu_image_answers(tiny_models: Any, tmp_path: Path) -> None:
    """Built from nothing; the model is a tiny one, which user 1000 may read."""
    model = shutil.copytree(tiny_models["qwen3_moe"], tmp_path / "model")
    for path in (model, *model.iterdir()):
        path.chmod(0o755)
    command = [ROOT / "scripts" / "image.sh", "cpu", model]
    wishes = {"PORT": str(free_port()), "PIP": f"{sys.executable} -m pip", "TAG": "tandem-test:cpu"}
    done = subprocess.run(
        ["env", *(f"{k}={v}" for k, v in wishes.items()), *command], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "uid=1000(tandem)" in done.stdout and "container" in done.stdout
    answer = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert answer["usage"]["completion_tokens"] > 0
