"""What Inductor does once in a process is done before it lowers, by one thread at a time."""

from __future__ import annotations

import logging
import platform
import threading

import pytest
import torch
from torch._inductor import config, cpu_vec_isa

from chunkflow_compile.lowering import warm_up as warming


class Probe:
    """A set of vector instructions whose probe fails ``failures`` times."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def __bool__(self) -> bool:
        self.failures -= 1
        return self.failures < 0


@pytest.mark.parametrize(("failures", "warned"), [(2, False), (3, True)])
def test_a_probe_that_ran_into_its_limit_is_repeated(
    failures: int, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    probe = Probe(failures)
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)
    monkeypatch.setattr(warming, "_PROBE_S", 0)
    monkeypatch.setattr(warming, "_of_this_cpu", lambda: [probe])
    with caplog.at_level(logging.WARNING, logger="chunkflow_compile"):
        warming.find_vector_instructions()
    assert probe.failures == (-1 if not warned else 0)
    assert ("ran into their time limit" in caplog.text) == warned


def test_a_probe_that_fails_at_once_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Probe(9)
    monkeypatch.setattr(warming, "_PROBE_S", float("inf"))
    monkeypatch.setattr(warming, "_of_this_cpu", lambda: [probe])
    warming.find_vector_instructions()
    assert probe.failures == 8


@pytest.mark.parametrize("works", [True, False])
def test_weaker_instructions_are_probed_only_where_they_are_needed(
    works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warming, "_PROBE_S", float("inf"))
    strong, weak, listed = Probe(0 if works else 9), Probe(9), list[bool | None]()
    monkeypatch.setattr(warming, "_of_this_cpu", lambda: [strong, weak])
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", lambda: listed.append(config.cpp.vec_isa_ok))
    warming.find_vector_instructions()
    assert listed == ([True] if works else [])
    assert weak.failures == (9 if works else 8)


def test_all_are_probed_where_another_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    probes = [Probe(0), Probe(0)]
    monkeypatch.setattr(warming, "_of_this_cpu", lambda: probes)
    with config.patch({"cpp.simdlen": 256}):
        warming.find_vector_instructions()
    assert [probe.failures for probe in probes] == [-1, -1]


def test_lowering_waits_for_the_search() -> None:
    warming.warm_up(torch.device("cpu"))
    warming.await_warm_up()
    assert not [t for t in threading.enumerate() if t.name == "chunkflow-warm-up"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="Inductor's probes are for x86")
def test_forgetting_lets_inductor_probe_again() -> None:
    known = [bool(isa) for isa in warming._of_this_cpu()]
    assert known and cached() > 0
    warming._forget()
    assert cached() == 0
    assert [bool(isa) for isa in warming._of_this_cpu()] == known


def cached() -> int:
    return vars(cpu_vec_isa.VecISA)["_VecISA__bool__impl"].cache_info().currsize
