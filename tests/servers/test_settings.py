"""What the plug-ins of servers read from the environment, and the releases that they support."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from helpers import Stack

from chunkflow_compile import offload, restore
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.placed.placement import placement_of
from chunkflow_compile.servers.settings import PluginSettings, settings_from

CPU = torch.device("cpu")
GIB = {"CHUNKFLOW_MEMORY": "1GiB"}


@pytest.mark.parametrize(
    ("environ", "settings"),
    [
        ({}, None),
        ({"CHUNKFLOW_MEMORY": ""}, None),
        ({"CHUNKFLOW_OPTIONS": "nonsense"}, None),
        (GIB, PluginSettings("1GiB", {})),
        ({**GIB, "CHUNKFLOW_OPTIONS": '{"chunk_bytes": 512}'}, PluginSettings("1GiB", {"chunk_bytes": 512})),
        ({"CHUNKFLOW_MEMORY": " 5 MB "}, PluginSettings("5 MB", {})),
        ({**GIB, "CHUNKFLOW_METRICS_PORT": "9400"}, PluginSettings("1GiB", {}, 9400)),
        ({**GIB, "CHUNKFLOW_OPTIONS": '{"peers": "auto"}'}, PluginSettings("1GiB", {}, peers="auto")),
        ({**GIB, "CHUNKFLOW_IGNORE_VERSION": "0"}, PluginSettings("1GiB", {})),
        ({**GIB, "CHUNKFLOW_IGNORE_VERSION": "1"}, PluginSettings("1GiB", {}, ignore_version=True)),
        (
            {**GIB, "CHUNKFLOW_OPTIONS": '{"pack": true, "peers": true}'},
            PluginSettings("1GiB", {"pack": True}, peers=True),
        ),
    ],
)
def test_settings_are_read(environ: dict[str, str], settings: PluginSettings | None) -> None:
    assert settings_from(environ) == settings


def test_a_plug_in_serves_the_metrics_of_all_its_models() -> None:
    from chunkflow_compile.servers.scrape import Scrape

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    scrape, models = Scrape(port), [offload(Stack(), min_bytes=1024) for _ in range(2)]
    for model in models:
        scrape.add(model)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        said = answer.read().decode()
    assert said.count("\nchunkflow_host_bytes{") == 2
    Scrape(None).add(models[0])


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("MEMORY", "much", "='much' is not a size: give bytes, or a text such as '8GiB' or '500MB'."),
        ("OPTIONS", "lowering=eager", " is not JSON (Expecting value: line 1 column 1 (char 0)): give an "),
        ("OPTIONS", '["eager"]', ' is ["eager"], and must be a JSON object: such as {"lowering": "eager"}.'),
        ("OPTIONS", '{"memory": "4GiB"}', ": leave it out of "),
        ("OPTIONS", '{"lowerin": "eager"}', ": Unknown option 'lowerin'; did you mean 'lowering'?"),
        ("OPTIONS", '{"lowering": "fast"}', ": Option lowering='fast' is unknown; use one of "),
        ("OPTIONS", '{"pack": "yes"}', ": Option pack='yes' is unknown; use one of False, True, auto."),
        ("OPTIONS", '{"peers": "yes"}', ": Option peers='yes' is unknown; use one of False, True, auto."),
        ("OPTIONS", '{"peers": 1}', ": Option peers=1 is unknown; use one of False, True, auto."),
        ("OPTIONS", '{"peer": true}', ": Unknown option 'peer'; did you mean 'peers'?"),
        ("OPTIONS", '{"slowdown": 1.1}', ": Give memory or slowdown, not both"),
        ("METRICS_PORT", "x", "='x' is no port"),
        ("IGNORE_VERSION", "yes", "='yes' is neither 0 nor 1."),
    ],
)
def test_bad_settings_are_refused(name: str, value: str, said: str) -> None:
    with pytest.raises(ChunkflowError, match=re.escape(f"CHUNKFLOW_{name}{said}")):
        settings_from({**GIB, f"CHUNKFLOW_{name}": value})


def place_with_peers(rank: int) -> None:
    """As each rank of a server does."""

    def settings(peers: str, hardware: str) -> PluginSettings:
        options = f'{{"min_bytes": 1024, "peers": {peers}, "hardware": "{hardware}"}}'
        found = settings_from({**GIB, "CHUNKFLOW_OPTIONS": options})
        assert found is not None
        return found

    model = Stack()
    with pytest.raises(
        ChunkflowError, match="peers=True keeps weights on the devices of all ranks, but cpu has no peer_"
    ):
        settings("true", "cpu").place(model, CPU)
    assert placement_of(model) is None
    for peers, hardware in (("true", "h100-nvlink"), ('"auto"', "cpu"), ("false", "cpu")):
        placement = placement_of(settings(peers, hardware).place(model, CPU))
        assert placement is not None and placement.peers == json.loads(peers)
        found = placement.store.peers
        assert (found is None) == (peers == "false") and (found is None or (found.place, found.ranks) == (rank, 2))
        restore(model)


def place_by_both_plug_ins(rank: int) -> None:
    """As the servers call them, of which no wheel is needed for that."""
    from chunkflow_compile.servers import sglang, vllm_omni

    found = PluginSettings("1GiB", {"min_bytes": 1024}, peers="auto")
    models = Stack(), Stack()
    with pytest.MonkeyPatch.context() as patch:
        path = ["sglang", "multimodal_gen", "runtime", "distributed"]
        for n in range(1, 5):
            patch.setitem(sys.modules, ".".join(path[:n]), SimpleNamespace(get_local_torch_device=lambda: CPU))
        sglang.Hooks(found).place(None, models[0])
    pipeline = SimpleNamespace(transformer=models[1], to=lambda device: None)
    backend = vllm_omni._Backend(found, None, CPU)
    backend.enable(pipeline)
    for model in models:
        placement = placement_of(model)
        assert placement is not None and placement.peers == "auto" and placement.store.peers is not None
    backend.disable()
    restore(models[0])


def test_both_plug_ins_place_with_peers(on_ranks: Callable[..., None]) -> None:
    on_ranks(place_by_both_plug_ins)


def test_a_plug_in_places_with_the_ranks_of_the_server(on_ranks: Callable[..., None]) -> None:
    on_ranks(place_with_peers)


def test_a_server_of_one_rank_has_no_peers() -> None:
    model = Stack()
    for peers in (True, "auto"):
        with pytest.raises(ChunkflowError, match="peers needs a process group of several ranks"):
            PluginSettings("1GiB", {}, peers=peers).place(model, CPU)  # type: ignore[arg-type]
    assert placement_of(model) is None


@pytest.mark.parametrize(
    "work",
    [
        "settings import settings_from; assert settings_from({}) is None",
        "sglang import plugin; plugin()",
        "vllm_omni import plug_in; plug_in()",
    ],
)
def test_without_memory_nothing_is_imported(work: str) -> None:
    """A server that has the plug-in, and no settings for it, is left alone."""
    check = "import sys; assert not {'torch', 'sglang', 'vllm_omni'} & {*sys.modules}"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CHUNKFLOW_")}
    subprocess.run([sys.executable, "-c", f"from chunkflow_compile.servers.{work}; {check}"], check=True, env=environ)


@pytest.mark.parametrize(
    ("installed", "supported"),
    [("0.5.23.post1", True), ("0.5.30", True), ("0.5.22", False), ("0.6.0rc1", False), ("dev", False)],
)
def test_an_unsupported_release_raises_an_error_unless_it_is_ignored(
    installed: str, supported: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("chunkflow_compile.servers.settings.version", lambda name: installed)
    found = f"This is aserver {installed}, and ChunkFlow's plug-in supports versions from 0.5.23 to below 0.6"
    fix = (
        ". Install a supported version, unset CHUNKFLOW_MEMORY to serve without streaming, or set "
        "CHUNKFLOW_IGNORE_VERSION=1 to try this one."
    )
    with contextlib.nullcontext() if supported else pytest.raises(ChunkflowError, match=f"^{re.escape(found + fix)}$"):
        PluginSettings("1GiB", {}).check_release("aserver", "0.5.23", "0.6")
    with caplog.at_level(logging.WARNING):
        PluginSettings("1GiB", {}, ignore_version=True).check_release("aserver", "0.5.23", "0.6")
    said = f"{found}: CHUNKFLOW_IGNORE_VERSION=1 uses it all the same."
    assert [record.getMessage() for record in caplog.records] == ([] if supported else [said])


def test_both_plug_ins_end_their_server_in_an_unsupported_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang goes on after any Exception of a plug-in, vLLM-Omni does not."""
    from chunkflow_compile.servers import sglang, vllm_omni

    monkeypatch.setattr("chunkflow_compile.servers.settings.version", lambda name: "99.0")
    monkeypatch.setenv("CHUNKFLOW_MEMORY", "1GiB")
    with pytest.raises(SystemExit, match=r"^This is sglang 99\.0, and .* from 0\.5\.23 to below 0\.5\.24\. Install"):
        sglang.plugin()
    with pytest.raises(ChunkflowError, match=r"^This is vllm-omni 99\.0, and .* from 0\.30 to below 0\.31\. Install"):
        vllm_omni.plug_in()
