"""A server of a diffusers pipeline on Ray Serve, its weights streamed by ChunkFlow: a GPU or a Ulysses group per replica.

    pip install '.[diffusers,ray]'
    python examples/serve_ray.py Wan-AI/Wan2.2-T2V-A14B-Diffusers --memory 24GiB --ulysses 2 --replicas 4
    python examples/serve_ray.py flux --tiny  # a small random pipeline, runs anywhere
    curl localhost:8000/generate -H "content-type: application/json" -d '{"prompt": "a boat", "format": "png"}' > boat.png

Ray Serve provides the HTTP server, the queue, the routing, the health checks and the restarts.  ``Front`` rejects requests
that are invalid or too large, and sends a request again if its replica dies; ``Generator`` is a replica, which runs one
request at a time.  The same request gives the same frames on any replica.  docs/servers-ray.md is the manual.
"""

import argparse
import asyncio
import functools
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

try:
    import ray
    from fastapi import FastAPI, HTTPException, Response
    from prometheus_client import CollectorRegistry
    from ray import serve
    from ray.exceptions import RayActorError
    from ray.serve.exceptions import BackPressureError
    from ray.util.metrics import Gauge
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    from serving import MEDIA, Request, as_json, build, generate, parse, warm_up
except ModuleNotFoundError as error:
    raise SystemExit(f"serve_ray.py needs {error.name}: pip install '.[diffusers,ray]'") from None

from needs import need

import chunkflow_compile
from chunkflow_compile.catalog.ulysses import enable_ulysses
from chunkflow_compile.servers.admit import Admitter

# Two applications, so that the replicas outlive the last request that waits for one.
FRONT, GENERATORS = "front", "generators"
# How often a request is sent to a replica, if they die with it.
ATTEMPTS = 3
# Seconds that the ranks of a group get to meet after an error.
TOGETHER = 10.0
# Figures in an answer, by the metrics that they are from.
COUNTED = {
    "moved_bytes": "chunkflow_moved_bytes_total",
    "predicted_s": "chunkflow_call_predicted_seconds_total",
    "measured_s": "chunkflow_call_seconds_sum",
}
http = FastAPI()


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
        chunkflow_compile.compile(self.pipe, device=self.device, memory=arguments.memory, **arguments.options)
        self.registry, self.gauges = CollectorRegistry(), dict[str, Gauge]()
        chunkflow_compile.metrics(self.pipe, registry=self.registry)
        self.thread = ThreadPoolExecutor(1)
        for request in warm_up(arguments):  # Serve counts the replica as running once this has returned
            self.thread.submit(generate, self.pipe, request).result()

    async def run(self, method: str, *given: Any) -> Any:
        """Call a method in the thread, after the calls that came before."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, getattr(self, method), *given)

    def generate(self, request: Request) -> dict[str, Any]:
        before, begun = self._publish(), time.perf_counter()
        try:
            files = generate(self.pipe, request)
        # The request is to blame, on any replica; diffusers asserts that the Ulysses degree divides its tokens.
        except (ValueError, AssertionError, chunkflow_compile.ChunkflowError) as error:
            raise ValueError(str(error).splitlines()[0]) from None  # what torch put on the error cannot be sent
        seconds, after = time.perf_counter() - begun, self._publish()
        counted = {field: after[name] - before.get(name, 0) for field, name in COUNTED.items()}
        return {"files": files, "seconds": seconds, **counted}

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


# Front's endpoints are pickled where the class is made: what they call is defined before it.
def answer(request: Request, result: dict[str, Any], admitted_s: float) -> Any:
    """A file with the figures in a header, or all of it as JSON."""
    files, figures = result.pop("files"), {**result, "admitted_s": admitted_s}
    if request.format == "json":
        return {"frames": as_json(files), **figures}
    return Response(files[0], media_type=MEDIA[request.format], headers={"x-chunkflow": json.dumps(figures)})


def states_of_replicas() -> dict[str, int]:
    """The number of replicas by Serve's name of their state, such as STARTING or RUNNING."""
    app = serve.status().applications.get(GENERATORS)
    deployments = app.deployments.values() if app else ()
    return {str(getattr(s, "value", s)): n for each in deployments for s, n in each.replica_states.items() if n}


@serve.deployment(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0}, graceful_shutdown_timeout_s=3600)
@serve.ingress(http)
class Front:
    """Takes requests over HTTP, and rejects invalid and too large ones before they wait for a replica."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.adapters, self.longest = arguments.adapter, arguments.seconds
        self.generators: Any = None  # a handle, from the first replica that is ready on
        self.admitter: Admitter | None = None
        self.asking = asyncio.Lock()

    @http.get("/healthz")
    async def healthz(self) -> dict[str, str]:
        """Liveness: this process answers."""
        return {"status": "ok"}

    @http.get("/readyz")
    async def readyz(self) -> dict[str, Any]:
        """Readiness: a replica has loaded its weights and generated the sizes of the warm-up."""
        states = await asyncio.get_running_loop().run_in_executor(None, states_of_replicas)
        if not states.get("RUNNING"):
            raise HTTPException(503, f"No replica is ready: {states or 'none has started'}.", {"retry-after": "10"})
        self.generators = self.generators or serve.get_deployment_handle("Generator", GENERATORS)
        return {"status": "ready", "replicas": states}

    async def admit(self, request: Request) -> chunkflow_compile.servers.admit.Admission:
        """Whether a request fits and how long it takes, before it waits for a replica."""
        async with self.asking:
            if self.admitter is None:
                self.admitter = await self.generators.admitter.remote()
        ask = functools.partial(self.admitter.admit, **request.sizes())
        return await asyncio.get_running_loop().run_in_executor(None, ask)

    @http.post("/generate")
    async def generate(self, request: Request) -> Any:
        if request.adapter is not None and request.adapter not in self.adapters:
            known = ", ".join(self.adapters) or "none"
            raise HTTPException(422, f"There is no adapter {request.adapter!r}; this server has: {known}.")
        if self.generators is None:
            await self.readyz()  # raises until a replica was ready once; later, requests wait while replicas restart
        for _ in range(ATTEMPTS):
            try:
                expected = await self.admit(request)
                if not expected.fits:
                    raise HTTPException(413, f"The request does not fit: {expected.reason}")
                if self.longest is not None and expected.total_s > self.longest:
                    text = f"The request would take {expected.total_s:.0f} s; the limit is {self.longest:.0f} s."
                    raise HTTPException(413, text)
                return answer(request, await self.generators.generate.remote(request), expected.total_s)
            except chunkflow_compile.ChunkflowError as error:
                raise HTTPException(422, str(error)) from error
            except ValueError as error:  # Ray wraps the replica's error
                raise HTTPException(422, str(getattr(error, "cause", error))) from error
            except BackPressureError as error:
                raise HTTPException(503, "The queue is full: ask again later.", {"retry-after": "10"}) from error
            except RayActorError:
                print("A replica died, and its request is sent again.", flush=True)
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


def main() -> None:
    arguments = parse(__doc__)
    need("diffusers", "transformers")  # the rest is checked above
    small = {"num_cpus": arguments.replicas * arguments.ulysses, "object_store_memory": 100 << 20}
    ray.init(**({**small, "include_dashboard": False} if arguments.tiny else {}))
    serve.start(http_options={"host": arguments.host, "port": arguments.port})
    serve.run(Front.bind(arguments), name=FRONT, route_prefix="/")  # first: it answers probes while replicas start
    serve.run(replicas(arguments), name=GENERATORS, route_prefix=None)
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
