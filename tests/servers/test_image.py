"""The files of docker/, which are checked without Docker: sources exist, and names agree with the package and the server."""

from __future__ import annotations

import re
import shlex
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from chunkflow_compile.hardware.caches import FOLDER_VARIABLE
from chunkflow_compile.servers.settings import settings_from

ROOT = Path(__file__).parent.parent.parent
DOCKER = ROOT / "docker"


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile with their arguments, without comments, in order."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, rest) for line in joined.splitlines() if line for name, _, rest in [line.partition(" ")]]


IMAGE = instructions((DOCKER / "Dockerfile").read_text())


def of(name: str) -> list[str]:
    return [rest for each, rest in IMAGE if each == name]


def variables() -> dict[str, str]:
    return dict(pair.split("=", 1) for rest in of("ENV") for pair in shlex.split(rest))


def is_ignored(path: str) -> bool:
    """Whether .dockerignore leaves a top-level file or folder out of the build context: its last line that matches."""
    ignored = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#") and fnmatch(path, line.lstrip("!")):
            ignored = not line.startswith("!")
    return ignored


def test_all_that_is_copied_exists_and_is_in_the_build_context() -> None:
    sources = [source for rest in of("COPY") for source in rest.split()[:-1]]
    assert {"chunkflow_compile", "passes", "examples"} <= {*sources}
    committed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    for source in sources:
        assert (ROOT / source).exists() and not is_ignored(source), source
        assert not committed or any(name == source or name.startswith(f"{source}/") for name in committed), source
    assert is_ignored("tests") and is_ignored(".venv") and is_ignored("docs")
    packaged = re.findall(r'"([A-Z]\w+(?:\.md)?)"|readme = "(.+?)"', (ROOT / "pyproject.toml").read_text())
    assert {"README.md", "LICENSE"} <= {a or b for a, b in packaged} & {*sources}, "setuptools reads them"


def test_the_base_image_and_the_packages() -> None:
    (base,) = of("FROM")
    assert re.fullmatch(r"nvidia/cuda:13\.\d\.\d-(runtime|devel)-ubuntu24\.04", base)
    arguments = dict(rest.split("=", 1) for rest in of("ARG"))
    assert f"TORCH ?= {arguments['TORCH']}\n" in (ROOT / "Makefile").read_text(), "the tested release"
    extras = re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert {*arguments["EXTRAS"].split(",")} <= {*extras}
    apt = next(rest for rest in of("RUN") if "apt-get install" in rest)
    for package in ("g++", "python3-dev", "python3-venv"):  # compilers of Inductor and of Triton's launchers
        assert f" {package} " in apt
    torch, package = (
        next(
            i for i, (name, rest) in enumerate(IMAGE) if name == "RUN" and rest == f"pip install --no-cache-dir {what}"
        )
        for what in ("${TORCH}", '".[${EXTRAS}]"')
    )
    copied = [i for i, (name, _) in enumerate(IMAGE) if name == "COPY"]
    assert torch < copied[0] < package, "the sources change more often than torch"


def test_caches_are_in_the_volume_which_the_user_of_the_image_may_write() -> None:
    (volume,), (user,) = of("VOLUME"), of("USER")
    assert user == "10001" and IMAGE.index(("USER", user)) > max(
        i for i, (name, _) in enumerate(IMAGE) if name == "RUN"
    )
    assert any(f"--uid {user} chunkflow" in rest and f"--owner chunkflow {volume}" in rest for rest in of("RUN"))
    known = variables()
    for name in ("XDG_CACHE_HOME", FOLDER_VARIABLE, "TRITON_CACHE_DIR", "HF_HOME"):
        assert known[name] == volume or known[name].startswith(f"{volume}/")


def manifests() -> dict[str, list[Any]]:
    yaml = pytest.importorskip("yaml")
    return {path.name: [*yaml.safe_load_all(path.read_text())] for path in DOCKER.glob("*.yaml")}


def test_compose_and_kubernetes_start_the_server_with_settings_that_it_accepts() -> None:
    pytest.importorskip("pydantic")
    from serving import parse

    found = manifests()
    service = found["compose.yaml"][0]["services"]["chunkflow"]
    (container,) = found["kubernetes.yaml"][0]["spec"]["template"]["spec"]["containers"]
    environment = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    assert (DOCKER / service["build"]["dockerfile"]).name == "Dockerfile"
    assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).exists()
    for command, given in ((service["command"], service["environment"]), (container["command"], environment)):
        assert command[0] == "python" and (ROOT / command[1]).exists()
        known = {name: value for name, value in given.items() if name.startswith("CHUNKFLOW")}
        arguments = parse("", command[2:], known)
        assert arguments.memory == "20GiB" and settings_from(known) is not None
        assert arguments.host == "0.0.0.0" and arguments.warm_up, "reached from outside, and ready after a warm-up"
        assert int(of("EXPOSE")[0]) == arguments.port


def test_probes_and_volumes() -> None:
    found = manifests()
    service = found["compose.yaml"][0]["services"]["chunkflow"]
    pod = found["kubernetes.yaml"][0]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    routes = re.findall(r'@http\.get\("(/\w+)"\)', (ROOT / "examples" / "serve_ray.py").read_text())
    assert {*routes} == {"/healthz", "/readyz"}
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/healthz",
        "liveness": "/healthz",
        "readiness": "/readyz",
    }
    assert {probe["port"] for probe in probes.values()} == {int(of("EXPOSE")[0])}
    assert "/healthz" in service["healthcheck"]["test"][-1]
    (volume,) = of("VOLUME")
    assert service["volumes"] == [f"cache:{volume}"] and service["ulimits"]["memlock"] == -1 and service["shm_size"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert {volume, "/dev/shm"} == {*mounts} and {*mounts.values()} == {each["name"] for each in pod["volumes"]}
    claims = {each["metadata"]["name"] for each in found["kubernetes.yaml"] if each["kind"] == "PersistentVolumeClaim"}
    assert {each["persistentVolumeClaim"]["claimName"] for each in pod["volumes"] if "emptyDir" not in each} == claims
    assert str(pod["securityContext"]["runAsUser"]) == of("USER")[0]
