"""What the plug-ins of servers read of the environment, and the releases that they know."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import urllib.request

import pytest
from helpers import Stack

from chunkflow_compile import offload
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.servers.settings import Settings, known_release, settings_from

GIB = {"CHUNKFLOW_MEMORY": "1GiB"}


@pytest.mark.parametrize(
    ("environ", "settings"),
    [
        ({}, None),
        ({"CHUNKFLOW_MEMORY": ""}, None),
        ({"CHUNKFLOW_OPTIONS": "nonsense"}, None),
        (GIB, Settings("1GiB", {})),
        (
            {"CHUNKFLOW_MEMORY": " 5 MB ", "CHUNKFLOW_OPTIONS": '{"chunk_bytes": 512}'},
            Settings("5 MB", {"chunk_bytes": 512}),
        ),
        ({**GIB, "CHUNKFLOW_METRICS_PORT": "9400"}, Settings("1GiB", {}, 9400)),
    ],
)
def test_settings_are_read(environ: dict[str, str], settings: Settings | None) -> None:
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
    ("memory", "options", "said"),
    [
        ("much", "", "CHUNKFLOW_MEMORY='much' is not a size: give bytes, or a text such as '8GiB' or '500MB'."),
        (
            "8GiB",
            "lowering=eager",
            "CHUNKFLOW_OPTIONS is not JSON (Expecting value: line 1 column 1 (char 0)): give an ",
        ),
        (
            "8GiB",
            '["eager"]',
            'CHUNKFLOW_OPTIONS is ["eager"], and must be a JSON object: such as {"lowering": "eager"}.',
        ),
        ("8GiB", '{"memory": "4GiB"}', "memory is in CHUNKFLOW_MEMORY and in CHUNKFLOW_OPTIONS: leave it out of "),
        ("8GiB", '{"lowerin": "eager"}', "CHUNKFLOW_OPTIONS: Unknown option 'lowerin'; did you mean 'lowering'?"),
        ("8GiB", '{"lowering": "fast"}', "CHUNKFLOW_OPTIONS: Option lowering='fast' is unknown; use one of "),
        ("8GiB", '{"slowdown": 1.1}', "CHUNKFLOW_OPTIONS: Give memory or slowdown, not both"),
    ],
)
def test_bad_settings_are_refused(memory: str, options: str, said: str) -> None:
    with pytest.raises(ChunkflowError) as refused:
        settings_from({"CHUNKFLOW_MEMORY": memory, "CHUNKFLOW_OPTIONS": options})
    assert str(refused.value).startswith(said)
    with pytest.raises(ChunkflowError, match="CHUNKFLOW_METRICS_PORT='x' is no port"):
        settings_from({**GIB, "CHUNKFLOW_METRICS_PORT": "x"})


def test_reading_no_settings_imports_no_torch() -> None:
    code = (
        "import sys; from chunkflow_compile.servers.settings import settings_from; "
        "assert settings_from({}) is None and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("installed", "known"),
    [("0.5.23.post1", True), ("0.5.30", True), ("0.5.22", False), ("0.6.0rc1", False), ("dev", False)],
)
def test_an_unknown_release_is_warned_of(
    installed: str, known: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("chunkflow_compile.servers.settings.version", lambda name: installed)
    with caplog.at_level(logging.WARNING):
        assert known_release("aserver", "0.5.23", "0.6") is known
    said = (
        f"This is aserver {installed}, and the plug-in of ChunkFlow knows 0.5.23 up to below 0.6: it does nothing, and no "
        "weights stream. Install such a release, or unset CHUNKFLOW_MEMORY."
    )
    assert [record.getMessage() for record in caplog.records] == ([] if known else [said])
