"""Several pipelines of the same components, one after another: made from an applied one, copied, dropped."""

from __future__ import annotations

import copy
import gc
import threading
import time
from typing import Any

import pytest
import torch
from small_pipelines import small_pipeline
from test_pipelines import EAGER, FLUX, WAN, models, same_weights

from chunkflow_compile import apply, remove
from chunkflow_compile.pipeline.budget import budget_of
from chunkflow_compile.weights.host_weight import HostWeight

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("quiet")


def placed(pipe: Any) -> set[str]:
    return {n for n, m in models(pipe).items() if any(isinstance(p, HostWeight) for p in m.parameters())}


def made_from(pipe: Any) -> Any:
    from diffusers import FluxImg2ImgPipeline

    made = FluxImg2ImgPipeline.from_pipe(pipe)
    made.set_progress_bar_config(disable=True)
    return made


IMAGE = {"image": torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(1)), "strength": 1.0}


@pytest.mark.long
def test_a_pipeline_made_from_an_applied_one() -> None:
    """It replaces the other, which is dropped: ``apply`` finds the components placed."""
    pipe, twin = small_pipeline("flux"), small_pipeline("flux")
    apply(pipe, memory="2MiB", **EAGER)
    FLUX.generate(pipe)
    pipe, twin = made_from(pipe), made_from(twin)
    gc.collect()
    apply(pipe)
    assert placed(pipe) == {*models(pipe)} == {phase.name for phase in budget_of(pipe).phases}
    for seed in range(2):
        assert torch.equal(FLUX.generate(pipe, seed, **IMAGE), FLUX.generate(twin, seed, **IMAGE))
    remove(pipe)
    assert not placed(pipe) and same_weights(pipe, twin)


def test_remove_of_a_pipeline_made_from_an_applied_one() -> None:
    """Not applied itself: ``remove`` undoes the components that no applied pipeline has."""
    pipe, twin = small_pipeline("flux"), small_pipeline("flux")
    apply(pipe, memory="2MiB", **EAGER)
    made = made_from(pipe)
    assert remove(made) is made and placed(pipe) == {*models(pipe)}, "pipe has them"
    del pipe
    gc.collect()
    remove(made)
    assert not placed(made) and all(m._compiled_call_impl is None for m in models(made).values())
    assert same_weights(made, twin) and torch.equal(
        FLUX.generate(made, **IMAGE), FLUX.generate(made_from(twin), **IMAGE)
    )


def test_a_shallow_copy_of_a_pipeline_that_is_removed() -> None:
    pipe, twin = small_pipeline("wan"), small_pipeline("wan")
    apply(pipe, memory="1MiB", **EAGER)
    other = copy.copy(pipe)
    assert torch.equal(WAN.generate(other), want := WAN.generate(twin))
    remove(pipe)
    assert torch.equal(WAN.generate(other), want)
    assert type(remove(other)) is type(twin) and budget_of(other) is None


def test_calls_that_wait_while_it_is_removed() -> None:
    """They run one at a time all the same: the scheduler counts the steps of one generation."""
    pipe, twin = small_pipeline("wan"), small_pipeline("wan")
    apply(pipe, memory="1MiB", **EAGER)
    other, got = copy.copy(pipe), dict[int, torch.Tensor]()

    def tell(*_: Any) -> dict[str, Any]:
        time.sleep(0.02)  # another thread runs
        return {}

    def serve(seed: int) -> None:
        got[seed] = WAN.generate((pipe, other)[seed % 2], seed, callback_on_step_end=tell)

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(4)]
    with budget_of(pipe).turn():
        for thread in threads:
            thread.start()
        time.sleep(0.1)  # they wait
        remove(pipe)
    for thread in threads:
        thread.join()
    assert all(torch.equal(got[seed], WAN.generate(twin, seed)) for seed in range(4))
    assert same_weights(pipe, twin)
