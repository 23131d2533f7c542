"""The server on Ray Serve, as a process: it is ready after its warm-up, every request is answered with the bytes of the
pipeline without it, also if a replica is killed, and invalid or too large requests get an error in a sentence."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import HANGS, HERE, WITHIN
from PIL import Image
from safetensors.torch import save_file
from small_pipelines import small_pipeline

for needed in ("ray.serve", "diffusers", "transformers", "peft"):
    pytest.importorskip(needed)
psutil = pytest.importorskip("psutil")

SMALL = {"prompt": "a paper boat", "height": 32, "width": 32, "steps": 3}
TOO_LARGE = {**SMALL, "height": 4096, "width": 4096}
MOST = ("--seconds", "5")
REPLICA, RANK = "ray::ServeReplica:generators:Generator", "ray::Rank"


class Server:
    """``examples/serve_ray.py --tiny``.  Every process that it starts has ended when the context has."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = folder / "server.log"
        self._command = [sys.executable, str(HERE.parent / "examples" / "serve_ray.py"), *arguments, "--tiny"]
        self._seen: set[psutil.Process] = set()

    def __enter__(self) -> Server:
        self._sockets = tempfile.TemporaryDirectory(prefix="ray")  # Ray's paths of sockets may not be long
        own = {"RAY_TMPDIR": self._sockets.name, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
        path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, **own, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "CHUNKFLOW_PROGRESS": "0"}
        with self.log.open("w") as log:
            command = [*self._command, "--port", str(self.port)]
            self.process = psutil.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            self.wait(lambda: self.probe() == (200, 503))  # while replicas start
            status, said = self.ask(SMALL)
            assert status == 503 and said["detail"].startswith("No replica is ready"), said
            self.wait(lambda: "metrics: http" in self.said())
            assert self.probe() == (200, 200)
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(self, *failed: Any) -> None:
        try:
            if failed == (None, None, None) and self.process.poll() is None:
                self.stop()
        finally:
            self._kill()

    def _kill(self) -> None:
        self.children()
        for process in {self.process, *self._seen}:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(self._seen, WITHIN)
        self.process.wait(WITHIN)
        self._sockets.cleanup()

    def said(self) -> str:
        return self.log.read_text()

    def wait(self, true: Callable[[], Any]) -> None:
        deadline = time.monotonic() + WITHIN
        while not true():
            assert self.process.poll() is None, self.said()[-4000:]
            assert time.monotonic() < deadline, self.said()[-4000:]
            time.sleep(0.1)

    def children(self, title: str = "") -> list[psutil.Process]:
        """The processes of this server whose title begins so."""
        found = self.process.children(recursive=True) if self.process.is_running() else []
        self._seen |= set(found)
        return [child for child in found if "".join(cmdline(child)).startswith(title)]

    def probe(self) -> tuple[int, int]:
        """The status of liveness and readiness, 0 while nothing listens."""

        def status(path: str) -> int:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=HANGS) as answer:
                    return int(answer.status)
            except urllib.error.HTTPError as failed:
                return failed.code
            except OSError:
                return 0

        return status("/healthz"), status("/readyz")

    def post(self, request: dict[str, Any]) -> tuple[Any, bytes]:
        """The answer's headers, and its body.  Raises HTTPError."""
        address, kind = f"http://127.0.0.1:{self.port}/generate", {"content-type": "application/json"}
        asked = urllib.request.Request(address, json.dumps(request).encode(), kind)
        with urllib.request.urlopen(asked, timeout=HANGS) as answer:
            return answer.headers, answer.read()

    def ask(self, request: dict[str, Any]) -> tuple[int, Any]:
        """The status and the answer, JSON."""
        try:
            return 200, json.loads(self.post(request)[1])
        except urllib.error.HTTPError as refused:
            return refused.code, json.load(refused)

    def frames(self, request: dict[str, Any]) -> list[np.ndarray]:
        """What is generated; it has streamed."""
        status, answer = self.ask(request)
        assert status == 200, answer
        figures = ("moved_bytes", "seconds", "measured_s", "predicted_s", "admitted_s")
        assert all(answer[figure] > 0 for figure in figures)
        return [np.asarray(Image.open(io.BytesIO(base64.b64decode(frame)))) for frame in answer["frames"]]

    def stop(self) -> None:
        """End it as a user does; nothing of it is left."""
        self.children()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(WITHIN) == 0, self.said()[-4000:]
        _, left = psutil.wait_procs(self._seen, WITHIN)
        assert not left


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended
        return []


@pytest.fixture
def adapters(tmp_path: Path) -> dict[str, str]:
    """Two random LoRAs of the small FLUX, each a folder."""
    found = {}
    for seed, name in enumerate(("ink", "wash")):
        rng, state = torch.Generator().manual_seed(seed), {}
        for block in ("transformer_blocks.0", "single_transformer_blocks.1"):
            for layer in ("to_q", "to_k"):
                state[f"transformer.{block}.attn.{layer}.lora_A.weight"] = torch.randn(16, 64, generator=rng)
                state[f"transformer.{block}.attn.{layer}.lora_B.weight"] = torch.randn(64, 16, generator=rng)
        (tmp_path / name).mkdir()
        save_file(state, tmp_path / name / "pytorch_lora_weights.safetensors")
        found[name] = str(tmp_path / name)
    return found


@pytest.fixture
def plain(adapters: dict[str, str]) -> Callable[[dict[str, Any]], list[np.ndarray]]:
    """What a FLUX of one's own generates from a request."""
    pipes = {None: small_pipeline("flux")}
    for name, folder in adapters.items():
        pipes[name] = small_pipeline("flux")
        pipes[name].load_lora_weights(folder)

    def generate(request: dict[str, Any]) -> list[np.ndarray]:
        call = {name: request[name] for name in request.keys() - {"steps", "seed", "adapter"}}
        noise = torch.Generator().manual_seed(request.get("seed", 0))
        pipe = pipes[request.get("adapter")]
        output = pipe(**call, num_inference_steps=request["steps"], generator=noise, output_type="pil")
        return [np.asarray(image) for image in output.images]

    return generate


def equal(some: list[np.ndarray], others: list[np.ndarray]) -> bool:
    return len(some) == len(others) and all(map(np.array_equal, some, others))


def test_a_replica(tmp_path: Path, adapters: dict[str, str], plain: Callable[..., Any]) -> None:
    started = ("flux", "--warm-up", "32x32", "--adapter", f"ink={adapters['ink']}", *MOST)
    with Server(tmp_path, *started) as server:
        seen = []
        guided = {"negative_prompt": "blurred", "true_cfg_scale": 4.0}
        for changed in ({}, {"seed": 7}, {"adapter": "ink"}, {"guidance_scale": 9.0}, guided, {}):
            seen.append(server.frames({**SMALL, **changed}))
            assert equal(seen[-1], plain({**SMALL, **changed})), changed
        assert not any(equal(seen[0], other) for other in seen[1:-1])
        headers, file = server.post({**SMALL, "format": "png"})
        assert headers["content-type"] == "image/png" and json.loads(headers["x-chunkflow"])["moved_bytes"] > 0
        assert equal([np.asarray(Image.open(io.BytesIO(file)))], seen[0])
        for changed, status, said in (
            ({"adapter": "oil"}, 422, "There is no adapter 'oil'; this server has: ink."),
            ({"height": 33}, 422, "multiple of 16"),
            ({"height": 4096, "width": 4096}, 413, "the limit is 5 s."),
            ({"format": "mp4"}, 422, "FluxPipeline generates images, and mp4 is for videos"),
            ({"hight": 32}, 422, "Extra inputs are not permitted"),
            ({"prompt": ""}, 422, "at least 1 character"),
            ({"num_frames": 5}, 422, "FluxPipeline has no argument 'num_frames'"),
        ):
            assert server.ask({**SMALL, **changed})[0] == status
            assert said in json.dumps(server.ask({**SMALL, **changed})[1]), changed
        later = [{**SMALL, "steps": 20, "seed": seed} for seed in range(3)]
        with ThreadPoolExecutor(len(later)) as pool:
            asked = [pool.submit(server.frames, request) for request in later]
            wait(asked, WITHIN, FIRST_COMPLETED)  # one is under way, and one waits for it
            server.stop()
            assert all(equal(answer.result(), plain(request)) for request, answer in zip(later, asked, strict=True))


def mixed() -> list[dict[str, Any]]:
    """Eighteen requests of three sizes, with both adapters and without one, no two of them equal."""
    sizes = ((32, 32), (64, 32), (48, 48))
    return [
        {**SMALL, "height": h, "width": w, "adapter": adapter, "seed": seed}
        for seed in range(2)
        for h, w in sizes
        for adapter in (None, "ink", "wash")
    ]


@pytest.mark.long
def test_a_replica_is_killed(tmp_path: Path, adapters: dict[str, str], plain: Callable[..., Any]) -> None:
    """No request is lost."""
    given = [part for name, folder in adapters.items() for part in ("--adapter", f"{name}={folder}")]
    with Server(tmp_path, "flux", "--replicas", "2", *MOST, *given) as server, ThreadPoolExecutor(20) as pool:
        asked = [pool.submit(server.frames, request) for request in mixed()]
        refused = [pool.submit(server.ask, {**TOO_LARGE, "seed": seed}) for seed in range(2)]
        server.wait(lambda: sum(answer.done() for answer in asked) >= 4)
        killed, other = server.children(REPLICA)
        killed.kill()
        assert sum(answer.done() for answer in asked) < len(asked)
        for request, answer in zip(mixed(), asked, strict=True):
            assert equal(answer.result(HANGS), plain(request)), request
        for answer in refused:
            status, said = answer.result(HANGS)
            assert status == 413 and "the limit is 5 s" in said["detail"]
        server.wait(lambda: {*server.children(REPLICA)} - {killed, other})


@pytest.mark.long
def test_a_group(tmp_path: Path) -> None:
    """Two ranks generate what one does; where one dies, the group starts anew."""
    request = {**SMALL, "num_frames": 5}
    call = {"prompt": SMALL["prompt"], "height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 3}
    want = small_pipeline("wan")(**call, generator=torch.Generator().manual_seed(0), output_type="pil").frames[0]
    with Server(tmp_path, "wan", "--ulysses", "2", "--warm-up", "32x32x5") as server:
        first = server.frames(request)
        headers, video = server.post({**request, "format": "mp4"})
        assert headers["content-type"] == "video/mp4" and video[4:8] == b"ftyp"
        assert len(first) == len(want) == 5
        for frame, alone in zip(first, want, strict=True):
            assert np.abs(frame.astype(int) - np.asarray(alone).astype(int)).max() <= 1  # of 255
        status, said = server.ask({**request, "height": 16, "width": 16, "num_frames": 1})
        assert status == 422 and "must be divisible" in said["detail"]
        (rank,) = server.children(RANK)
        with ThreadPoolExecutor(1) as pool:
            under_way = pool.submit(server.frames, {**request, "steps": 30})
            rank.kill()
            assert len(under_way.result(HANGS)) == 5
        assert equal(server.frames(request), first)
        (another,) = server.children(RANK)
        assert another != rank
