"""Metrics: what a scrape says is what the models did, and a scrape disturbs none of them."""

from __future__ import annotations

import gc
import json
import re
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from conftest import EAGER, HERE, WRAPS
from helpers import Stack

from chunkflow_compile import ChunkflowError, cycles, explain, metrics, offload, programs, replan, restore, spans
from chunkflow_compile.runtime.device_base import FIRST_STEPS

prometheus_client = pytest.importorskip("prometheus_client")
DOCS = HERE.parent / "docs"

pytestmark = pytest.mark.usefixtures("no_grad", "quiet")
Values = dict[tuple[str, str], float]


@pytest.fixture
def registry() -> Any:
    return prometheus_client.CollectorRegistry()


@pytest.fixture
def scrape(registry: Any) -> Iterator[Callable[[], Values]]:
    """A real scrape over HTTP: (name, model) -> value."""
    server, thread = prometheus_client.start_http_server(0, "127.0.0.1", registry)

    def get() -> Values:
        from prometheus_client.parser import text_string_to_metric_families

        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=60) as answer:
            families = text_string_to_metric_families(answer.read().decode())
            samples = [s for family in families for s in family.samples]
        assert all(s.labels["rank"] == "0" for s in samples)
        return {(s.name, s.labels["model"]): s.value for s in samples}

    yield get
    server.shutdown()
    server.server_close()
    thread.join()


def check_growing(before: Values, after: Values) -> None:
    counted = [key for key in before if key[0].endswith(("_total", "_sum", "_count"))]
    assert counted and all(after[key] >= before[key] for key in counted)


def placed_stack(**options: Any) -> Any:
    model = offload(Stack(), min_bytes=4096)
    return torch.compile(model, backend="chunkflow", options={**EAGER, **options})


def test_a_scrape_says_what_was_measured(registry: Any, scrape: Callable[[], Values]) -> None:
    model = placed_stack(hardware=WRAPS)
    metrics(model, registry=registry)
    for _ in range(3):
        model(torch.randn(4, 8))
    (program,) = programs(model)
    took = program.measurements
    found = {name: value for (name, label), value in scrape().items() if label == "Stack"}
    assert found["chunkflow_calls_total"] == found["chunkflow_call_seconds_count"] == 3
    assert found["chunkflow_call_seconds_sum"] == pytest.approx(sum(m.step_s for m in took))
    assert found["chunkflow_call_predicted_seconds_total"] == pytest.approx(3 * program.plan.predicted.step_s)
    assert found["chunkflow_stall_seconds_total"] == pytest.approx(sum(m.exposed_h2d_s for m in took))
    assert found["chunkflow_collective_seconds_total"] == pytest.approx(sum(m.collective_s for m in took))
    assert found["chunkflow_moved_bytes_total"] == sum(m.moved_bytes + m.primed_bytes for m in took) > 0
    assert found["chunkflow_cold_starts_total"] == sum(m.primed_bytes > 0 for m in took) == 1
    assert found["chunkflow_programs_total"] == 1
    assert found["chunkflow_off_cycle_calls_total"] == 0
    assert found["chunkflow_device_bytes"] == program.arena.held > 0
    assert found["chunkflow_host_bytes"] == sum(b.nbytes for b in program.buffers.values())
    (store,) = {buffer.store for buffer in program.buffers.values()}
    assert found["chunkflow_pinned_bytes"] == store.pinned_bytes > 0
    assert found["chunkflow_drive_bytes"] == found["chunkflow_fetched_bytes_total"] == 0
    assert found["chunkflow_graph_captures_total"] == found["chunkflow_graph_capture_seconds_total"] == 0
    assert found["chunkflow_row_hits_total"] == found["chunkflow_row_misses_total"] == 0
    assert found["chunkflow_row_fill_seconds_total"] == found["chunkflow_row_bytes"] == 0
    assert found["chunkflow_graph_launches_total"] == found["chunkflow_graph_bytes"] == 0


def test_counters_never_fall(registry: Any, scrape: Callable[[], Values]) -> None:
    """Over another plan, another size, and a model that is restored and placed again."""
    model = placed_stack()
    metrics(model, registry=registry)
    x, label = torch.randn(4, 8), "Stack"
    model(x)
    last = scrape()

    def grows(calls: int) -> None:
        nonlocal last
        check_growing(last, found := scrape())
        assert found["chunkflow_calls_total", label] == calls
        last = found

    replan(model, slowdown=3.0)
    model(x)
    grows(2)
    model(torch.randn(6, 8))
    grows(3)
    model(x)
    restore(model)
    assert scrape() == {}, "a restored model vanishes"
    model(x)
    grows(5)


def test_calls_off_the_cycle(registry: Any, scrape: Callable[[], Values]) -> None:
    model = offload(Stack(layers=3), min_bytes=4096)
    for block in model.blocks:
        block.compile(backend="chunkflow", options=EAGER)
    metrics(model, registry=registry)
    for _ in range(5):
        model(torch.randn(4, 8))
    model.blocks[1](torch.randn(4, 32))
    (bound,) = cycles(model)
    found = scrape()
    assert found["chunkflow_off_cycle_calls_total", "Stack"] == bound.jumps == 1
    assert found["chunkflow_calls_total", "Stack"] == 16


def test_a_scrape_does_not_wait_for_a_call(registry: Any) -> None:
    """While another thread holds the lock that a call holds, and while it calls."""
    model, twin = placed_stack(), Stack()
    twin.load_state_dict({k: v.clone() for k, v in model._orig_mod.state_dict().items()})
    metrics(model, registry=registry)
    x = torch.randn(4, 8)
    model(x)
    with ThreadPoolExecutor() as pool:
        with programs(model)[0].arena.lock():
            assert pool.submit(prometheus_client.generate_latest, registry).result(60)
        stop = threading.Event()

        def scrapes() -> None:
            while not stop.is_set():
                prometheus_client.generate_latest(registry)

        scraping = pool.submit(scrapes)
        try:
            for i in range(8):
                if i % 4 == 0:
                    restore(model)
                assert torch.equal(model(x), twin(x))
        finally:
            stop.set()
    scraping.result()


def test_models_that_are_gone_vanish(registry: Any, scrape: Callable[[], Values]) -> None:
    first, second = placed_stack(), placed_stack()
    collector = metrics(first, second, registry=registry)
    x = torch.randn(4, 8)
    first(x)
    second(x)
    assert {label for _, label in scrape()} == {"Stack", "Stack-2"}
    del first
    torch._dynamo.reset()
    gc.collect()
    assert {label for _, label in scrape()} == {"Stack-2"}
    collector.unregister()
    assert scrape() == {}


def test_a_pipeline_by_component(registry: Any, scrape: Callable[[], Values], applied: Callable[..., Any]) -> None:
    from small_pipelines import SMALL_PIPELINES

    pipe, budget = applied("wan")
    metrics(pipe, registry=registry)
    SMALL_PIPELINES["wan"].generate(pipe)
    before = scrape()
    SMALL_PIPELINES["wan"].generate(pipe)
    found = scrape()
    check_growing(before, found)
    assert {p.name for p in explain(pipe).phases} == {label for _, label in found}
    for phase in budget.phases:
        assert found["chunkflow_budget_bytes", phase.name] == 2**20
        assert found["chunkflow_host_bytes", phase.name] == phase.streamed
    on_device = sum(v for (n, _), v in found.items() if n == "chunkflow_device_bytes")
    assert on_device == sum({p.arena: p.arena.held for p in budget.phases}.values())
    assert found["chunkflow_calls_total", "transformer"] > before["chunkflow_calls_total", "transformer"]


def test_the_dashboard_and_the_page_name_what_is_scraped(registry: Any) -> None:
    """By the names of the samples, as the registry exposes them; a summary has two."""
    names = set()
    for family in metrics(registry=registry).describe():
        ends = {"counter": ("_total",), "summary": ("_sum", "_count")}.get(family.type, ("",))
        names |= {family.name + end for end in ends}
    dashboard = (DOCS / "grafana.json").read_text()
    assert json.loads(dashboard)["panels"]
    assert set(re.findall(r"chunkflow_\w+", dashboard)) <= names
    rows = re.findall(r"^\| `(chunkflow_\w+)`(?:, `(chunkflow_\w+)`)? \|", (DOCS / "metrics.md").read_text(), re.M)
    assert {name for row in rows for name in row if name} == names


def test_errors(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics(registry=registry)
    with pytest.raises(ChunkflowError, match="pass all models in one call"):
        metrics(registry=registry)
    with pytest.raises(ChunkflowError, match="This int is neither a model nor a diffusers pipeline"):
        metrics(3, registry=registry)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ChunkflowError, match=r"pip install 'prometheus-client>=[\d.]+' 'opentelemetry-api>="):
        metrics()
    with pytest.raises(ChunkflowError, match="Spans need opentelemetry-api: pip install 'prom"), spans(Stack()):
        pass


def test_spans_of_a_request() -> None:
    """Below the current span, with the times and figures of the measurements; other requests' steps are not among them."""
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("server")
    model, x = placed_stack(), torch.randn(4, 8)
    for _ in range(FIRST_STEPS + 4):  # from then on, most are not measured
        model(x)
    with tracer.start_as_current_span("request"), spans(model, tracer):
        model(x)
        model(x)
    *steps, phase, request = sorted(exporter.get_finished_spans(), key=lambda s: (s.name != "chunkflow step", s.name))
    assert [s.name for s in (phase, request)] == ["chunkflow Stack", "request"]
    assert phase.parent.span_id == request.context.span_id
    (program,) = programs(model)
    assert len(steps) == 2
    for step, took in zip(steps, program.measurements[-2:], strict=True):
        assert step.parent.span_id == phase.context.span_id
        assert request.start_time <= phase.start_time <= step.start_time < step.end_time <= phase.end_time
        assert step.end_time - step.start_time == pytest.approx(1e9 * took.step_s, abs=2000)
        assert step.attributes == {
            "chunkflow.plan": program.plan.digest,
            "chunkflow.calls": 1,
            "chunkflow.measured_s": took.step_s,
            "chunkflow.predicted_s": program.plan.predicted.step_s,
            "chunkflow.stalled_s": took.exposed_h2d_s,
            "chunkflow.collective_s": took.collective_s,
            "chunkflow.moved_bytes": took.moved_bytes + took.primed_bytes,
        }
