"""A server of a diffusers pipeline on Ray Serve, its weights streamed by ChunkFlow: one replica a GPU, or a Ulysses group.

    pip install '.[diffusers,ray]'
    python examples/serve_ray.py Wan-AI/Wan2.2-T2V-A14B-Diffusers --memory 24GiB --ulysses 2 --replicas 4
    python examples/serve_ray.py flux --tiny  # a small random pipeline, runs anywhere
    curl localhost:8000/generate -H "content-type: application/json" -d '{"prompt": "a paper boat", "seed": 1}'

Ray Serve has the HTTP server, the queue, the routing, the health checks and the restarts.  ``Front`` refuses what is wrong or
too large, and sends a request again if its replica dies; ``Generator`` is a replica, which takes one request at a time.  A
generation is a function of its request, so that any replica gives the same bytes.  docs/servers-ray.md has the rest.
"""

import argparse
import asyncio
import base64
import functools
import inspect
import io
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

try:
    import ray
    from fastapi import FastAPI, HTTPException
    from prometheus_client import CollectorRegistry
    from pydantic import BaseModel, ConfigDict, Field
    from ray import serve
    from ray.exceptions import RayActorError
    from ray.serve.exceptions import BackPressureError
    from ray.util.metrics import Gauge
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ModuleNotFoundError as error:
    raise SystemExit(f"serve_ray.py needs {error.name}: pip install '.[diffusers,ray]'") from None

from needs import need

import chunkflow_compile
from chunkflow_compile import use_adapters
from chunkflow_compile.catalog.ulysses import enable_ulysses
from chunkflow_compile.servers.admit import Admitter

# Two applications, so that the replicas outlive the last request that waits for one.
FRONT, GENERATORS = "front", "generators"
# How often a request is sent to a replica, if they die with it.
ATTEMPTS = 3
# Seconds that the ranks of a group get to meet after an error.
TOGETHER = 10.0
# What the metrics say of a generation, in its answer.
COUNTED = {
    "moved_bytes": "chunkflow_moved_bytes_total",
    "predicted_s": "chunkflow_call_predicted_seconds_total",
    "measured_s": "chunkflow_call_seconds_sum",
}
http = FastAPI()


class Request(BaseModel):
    """One generation.  ``num_frames``: of a video; ``adapter``: the name of a LoRA that the server was started with."""

    model_config = ConfigDict(extra="forbid")
    prompt: str = Field(min_length=1)
    height: int = Field(512, ge=16, le=4096, multiple_of=16)
    width: int = Field(512, ge=16, le=4096, multiple_of=16)
    num_frames: int | None = Field(None, ge=1, le=1024)
    steps: int = Field(28, ge=1, le=1000)
    seed: int = Field(0, ge=0, lt=2**63)
    adapter: str | None = None


def build(arguments: argparse.Namespace) -> Any:
    """The pipeline with its adapters, its weights in host memory."""
    if arguments.tiny:
        from small_pipelines import small_pipeline

        pipe = small_pipeline(arguments.model)
    else:
        from diffusers import DiffusionPipeline

        pipe = DiffusionPipeline.from_pretrained(arguments.model, torch_dtype=torch.bfloat16)
    for name, path in arguments.adapter.items():
        pipe.load_lora_weights(path, adapter_name=name)
    return pipe


def generate(pipe: Any, request: Request) -> list[str]:
    """The image, or the frames of the video, as PNGs in base64.  Raises ValueError for what the pipeline does not take."""
    call = request.model_dump(exclude={"steps", "seed", "adapter"}, exclude_none=True)
    if unknown := call.keys() - inspect.signature(pipe.__call__).parameters.keys():
        raise ValueError(f"{type(pipe).__name__} takes no {', '.join(unknown)}: leave it out.")
    noise = torch.Generator().manual_seed(request.seed)
    with use_adapters(pipe, request.adapter) if hasattr(pipe, "set_adapters") else nullcontext():
        found = pipe(**call, num_inference_steps=request.steps, generator=noise, output_type="pil")[0]
    frames = found[0] if isinstance(found[0], list) else found
    files = [io.BytesIO() for _ in frames]
    for frame, file in zip(frames, files, strict=True):
        frame.save(file, "PNG")
    return [base64.b64encode(file.getvalue()).decode() for file in files]


class Rank:
    """A process of a replica: the compiled pipeline, and the one thread that calls it.

    ``store``: host and port at which the ranks of a Ulysses group meet; a rank alone needs none.
    """

    def __init__(self, arguments: argparse.Namespace, rank: int = 0, store: Any = None) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # Ray shows a process its own GPU
        self.pipe = build(arguments)
        if store is not None:
            store = dist.TCPStore(*store) if isinstance(store, tuple) else store
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=arguments.ulysses)
            for name, model in self.pipe.components.items():
                if name.startswith("transformer") and model is not None:
                    enable_ulysses(model, arguments.ulysses)
        for path in arguments.warm:
            torch.compiler.load_cache_artifacts(Path(path).read_bytes())
        given = {"min_bytes": 2048, "lowering": "eager"} if arguments.tiny else {}
        chunkflow_compile.compile(self.pipe, device=self.device, memory=arguments.memory, **given)
        self.registry, self.gauges = CollectorRegistry(), dict[str, Gauge]()
        chunkflow_compile.metrics(self.pipe, registry=self.registry)
        self.thread = ThreadPoolExecutor(1)

    async def run(self, method: str, *given: Any) -> Any:
        """Call a method in the thread, after the calls that came before."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, getattr(self, method), *given)

    def generate(self, request: Request) -> dict[str, Any]:
        before, begun = self._publish(), time.perf_counter()
        try:
            frames = generate(self.pipe, request)
        # The request is to blame, on any replica; diffusers asserts that the Ulysses degree divides its tokens.
        except (ValueError, AssertionError, chunkflow_compile.ChunkflowError) as error:
            raise ValueError(str(error).splitlines()[0]) from None  # what torch put on the error cannot be sent
        seconds, after = time.perf_counter() - begun, self._publish()
        counted = {field: after[name] - before.get(name, 0) for field, name in COUNTED.items()}
        return {"frames": frames, "seconds": seconds, **counted}

    def _publish(self) -> dict[str, float]:
        """Give ChunkFlow's metrics to Ray, which each node exports with its own; return each, summed over the models."""
        sums: dict[str, float] = {}
        for family in self.registry.collect():
            for name, labels, value, *_ in family.samples:
                sums[name] = sums.get(name, 0) + value
                self.gauges[name] = self.gauges.get(name) or Gauge(name, family.documentation, tuple(labels))
                self.gauges[name].set(value, labels)
        return sums

    def meet(self) -> None:
        """Return when all ranks of the group have come here."""
        if dist.is_initialized():
            dist.all_reduce(here := torch.zeros(1, device=self.device))
            here.item()

    def admitter(self) -> Admitter:
        """What tells, in another process, whether a request fits and how long it takes."""
        return Admitter.of(self.pipe)

    async def check(self) -> None:
        """Raises if the device has failed."""
        if torch.cuda.is_available():
            torch.cuda.current_stream().query()


@serve.deployment(max_ongoing_requests=1, health_check_period_s=5, graceful_shutdown_timeout_s=3600)
class Generator:
    """A replica.  It is rank 0, and starts an actor for each other rank in its placement group."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.others: list[Any] = []
        store = None
        if arguments.ulysses > 1:
            host = ray.util.get_node_ip_address()
            store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            for rank in range(1, arguments.ulysses):
                place = PlacementGroupSchedulingStrategy(ray.util.get_current_placement_group(), rank)
                actor = ray.remote(Rank).options(scheduling_strategy=place, **resources(arguments))
                self.others.append(actor.remote(arguments, rank, (host, store.port)))
        self.rank = Rank(arguments, 0, store)

    def everywhere(self, method: str, *given: Any) -> list[Any]:
        """What each rank is about to return."""
        mine = asyncio.ensure_future(getattr(self.rank, method)(*given))
        return [mine, *(getattr(other, method).remote(*given) for other in self.others)]

    async def generate(self, request: Request) -> dict[str, Any]:
        try:
            return (await asyncio.gather(*self.everywhere("run", "generate", request)))[0]
        except Exception as error:
            try:  # if all ranks refused the request, they still meet; one that failed alone left the others in a collective
                await asyncio.wait_for(asyncio.gather(*self.everywhere("run", "meet")), TOGETHER)
            except Exception as apart:  # noqa: BLE001  whatever it is, this group is no more
                print(f"This replica ends, and Serve starts another: {error}; {apart!r}", flush=True)
                os._exit(1)
            raise

    async def admitter(self) -> Admitter:
        return await self.rank.run("admitter")

    async def check_health(self) -> None:
        await asyncio.gather(*self.everywhere("check"))


@serve.deployment(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0}, graceful_shutdown_timeout_s=3600)
@serve.ingress(http)
class Front:
    """Takes requests over HTTP, and refuses those that are wrong or too large before they wait for a replica."""

    def __init__(self, generators: Any, arguments: argparse.Namespace) -> None:
        self.generators, self.adapters, self.most = generators, arguments.adapter, arguments.seconds
        self.admitter: Admitter | None = None
        self.asking = asyncio.Lock()

    async def admit(self, request: Request) -> chunkflow_compile.servers.admit.Admission:
        """Whether a request fits and how long it takes: asked here, before it waits for a replica."""
        async with self.asking:
            if self.admitter is None:
                self.admitter = await self.generators.admitter.remote()
        sizes = request.model_dump(include={"height", "width", "num_frames"}, exclude_none=True)
        ask = functools.partial(self.admitter.admit, num_inference_steps=request.steps, **sizes)
        return await asyncio.get_running_loop().run_in_executor(None, ask)

    @http.post("/generate")
    async def generate(self, request: Request) -> dict[str, Any]:
        if request.adapter is not None and request.adapter not in self.adapters:
            known = ", ".join(self.adapters) or "none"
            raise HTTPException(422, f"There is no adapter {request.adapter!r}; this server has: {known}.")
        for _ in range(ATTEMPTS):
            try:
                answer = await self.admit(request)
                if not answer.fits:
                    raise HTTPException(413, f"The request does not fit: {answer.reason}")
                if self.most is not None and answer.total_s > self.most:
                    text = f"The request would take {answer.total_s:.0f} s; this server takes {self.most:.0f}: ask for less."
                    raise HTTPException(413, text)
                return {**await self.generators.generate.remote(request), "admitted_s": answer.total_s}
            except chunkflow_compile.ChunkflowError as error:
                raise HTTPException(422, str(error)) from error
            except ValueError as error:  # as Ray brings it
                raise HTTPException(422, str(error.cause)) from error
            except BackPressureError as error:
                raise HTTPException(503, "The queue is full: ask again later.", {"retry-after": "10"}) from error
            except RayActorError:
                print("A replica died: Serve sends no request again, so this does.", flush=True)
        raise HTTPException(500, f"{ATTEMPTS} replicas died with this request.")


def resources(arguments: argparse.Namespace) -> dict[str, Any]:
    """What Ray keeps for a rank, which divides the memory of its machine by the number of ranks there."""
    most = max(int(node["Resources"].get("GPU", 1)) for node in ray.nodes())
    ranks = {"LOCAL_WORLD_SIZE": str(min(most, arguments.replicas * arguments.ulysses))}
    return {"num_cpus": 1, "num_gpus": 0 if arguments.tiny else 1, "runtime_env": {"env_vars": ranks}}


def replicas(arguments: argparse.Namespace) -> serve.Application:
    options: dict[str, Any] = {"ray_actor_options": resources(arguments), "max_queued_requests": arguments.queue}
    if arguments.ulysses > 1:
        bundle = {"CPU": 1} if arguments.tiny else {"CPU": 1, "GPU": 1}
        options |= {"placement_group_bundles": [bundle] * arguments.ulysses, "placement_group_strategy": "PACK"}
    return Generator.options(num_replicas=arguments.replicas, **options).bind(arguments)


def parse(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a pipeline on the hub or in a folder; with --tiny a name in small_pipelines.py")
    parser.add_argument("--tiny", action="store_true", help="a small random pipeline, without a GPU")
    parser.add_argument("--memory", help="most bytes on a device, such as 24GiB (default: what is free)")
    parser.add_argument("--ulysses", type=int, default=1, metavar="P", help="ranks of a replica")
    parser.add_argument("--replicas", type=int, default=1, metavar="N")
    parser.add_argument("--adapter", action="append", default=[], metavar="NAME=PATH", help="a LoRA; may be repeated")
    saved = "of torch.compiler.save_cache_artifacts(); may be repeated"
    parser.add_argument("--warm", action="append", default=[], metavar="FILE", help=saved)
    parser.add_argument("--seconds", type=float, metavar="S", help="longest request, by its predicted time")
    parser.add_argument("--queue", type=int, default=100, metavar="N", help="most requests that wait for a replica")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    found = parser.parse_args(given)
    found.adapter = dict(pair.split("=", 1) for pair in found.adapter)
    found.memory = found.memory or ("1MiB" if found.tiny else None)
    return found


def main() -> None:
    arguments = parse()
    need("diffusers", "transformers")  # the rest is checked above
    small = {"num_cpus": arguments.replicas * arguments.ulysses, "object_store_memory": 100 << 20}
    ray.init(**({**small, "include_dashboard": False} if arguments.tiny else {}))
    serve.start(http_options={"host": arguments.host, "port": arguments.port})
    generators = serve.run(replicas(arguments), name=GENERATORS, route_prefix=None)
    serve.run(Front.bind(generators, arguments), name=FRONT, route_prefix="/")
    for node in ray.nodes():
        print(f"metrics: http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics", flush=True)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
    for app in (FRONT, GENERATORS):  # answers what was asked, then ends the replicas; shutdown alone cuts connections
        serve.delete(app, _blocking=False)
        while app in serve.status().applications:
            time.sleep(0.5)
    serve.shutdown()


if __name__ == "__main__":
    main()
