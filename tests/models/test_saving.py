"""Lowered regions are found again: in Inductor's caches, and in a file that another process or machine loads."""

from __future__ import annotations

import ast
import json
import logging
import os
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from conftest import HERE, OPTIONS
from helpers import Stack, cut_of, twins
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config, cpu_vec_isa
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.utils import fresh_cache

import chunkflow_compile
from chunkflow_compile import ChunkflowError
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.model import plan_cache
from chunkflow_compile.model.plan_cache import DiskPlans
from chunkflow_compile.passes import pipeline
from chunkflow_compile.passes.pipeline import Settings, make_plan

pytestmark = pytest.mark.usefixtures("no_grad")

# Models compiled lazily, whole (whose regions are those of the first) and by kind, at two sizes, and one by torch itself.
RUN = """
import sys
from pathlib import Path
import torch
import chunkflow_compile
from conftest import OPTIONS
from helpers import Stack, twins
from torch._dynamo.utils import counters

saved, again = map(Path, sys.argv[1:])
if saved.exists():
    assert torch.compiler.load_cache_artifacts(saved.read_bytes()) is not None
with torch.no_grad():
    for how in ("lazy", "whole", "kind", "plain"):
        model, twin = twins(lambda: Stack(2, width=48 if how == "kind" else 32))
        if how == "whole":
            chunkflow_compile.offload(model, min_bytes=OPTIONS["min_bytes"])
        if how == "kind":
            chunkflow_compile.compile(model, **OPTIONS, dynamic=False)
        elif how == "plain":
            model.compile(fullgraph=True)
        else:
            model.compile(backend="chunkflow", fullgraph=True, options=OPTIONS)
        for rows in (4, 6) if how == "kind" else (4,):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(model(x), twin(x))
        moved = [p.measurements[-1].moved_bytes for p in chunkflow_compile.programs(model)]
        assert how == "plain" or sum(moved) > 0
blob, info = torch.compiler.save_cache_artifacts()
again.write_bytes(blob)
kept = {kind: sorted(keys) for kind, keys in info.artifacts.items()}
print((kept, {name: counters["aot_autograd"][f"autograd_cache_{name}"] for name in ("hit", "miss", "bypass")}))
"""


def run(model: nn.Module, by_kind: bool = False, **options: Any) -> tuple[int, int]:
    """Compile a model and check a call; return the regions that Inductor's caches had, and those that they had not."""
    torch._dynamo.reset()
    counters.clear()
    x = torch.randn(4, 8)
    expected = model(x)
    given = {**OPTIONS, **options}
    if by_kind:
        compiled = chunkflow_compile.compile(model, **given)
    else:
        compiled = torch.compile(model, backend="chunkflow", fullgraph=True, options=given)
    torch.testing.assert_close(compiled(x), expected)
    found = counters["aot_autograd"]
    return found["autograd_cache_hit"], found["autograd_cache_miss"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "regions.zip"
    model = Stack()
    with torch.no_grad(), fresh_cache():
        assert run(model) == (0, 3)
        assert chunkflow_compile.save(model, path) == 3
    return path


def refuse_to_plan(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("a plan was made again")


def test_a_saved_region_and_plan_are_not_made_again(file: Path, tmp_path: Path) -> None:
    model = Stack()
    with fresh_cache(), pytest.MonkeyPatch.context() as patch:
        assert chunkflow_compile.load(file) == 3
        patch.setattr(pipeline, "place", refuse_to_plan)
        assert run(model) == (3, 0)
        assert chunkflow_compile.save(model, tmp_path / "again.zip") == 3
        with pytest.raises(Exception, match="a plan was made again"):
            run(Stack(), slowdown=1.1)
    with fresh_cache():
        assert chunkflow_compile.load(tmp_path / "again.zip") == 3
        assert run(Stack(layers=5)) == (3, 0), "another model, another count of blocks: the names of their ops differ"
        hits, _ = run(Stack(layers=3), by_kind=True)
        assert hits > 0


def test_artifacts_of_torch_are_those_of_all_regions(tmp_path: Path) -> None:
    def in_a_process(number: int) -> Any:
        saved, again = tmp_path / str(number), tmp_path / str(number + 1)
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / f"cache_{number}"),
            "PYTHONPATH": str(HERE),
        }
        command = [sys.executable, "-c", RUN, str(saved), str(again)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return ast.literal_eval(done.stdout.splitlines()[-1])

    kept, counts = in_a_process(0)
    regions = len(kept["aot_autograd"])
    assert regions > 4 and len(kept["inductor"]) == regions == counts["miss"] and not counts["bypass"]
    again, counts = in_a_process(1)
    assert counts["hit"] >= regions and not counts["miss"] and not counts["bypass"]
    assert again == kept, "a process that compiled nothing saves the same"


def test_regions_of_open_sizes_are_found_by_other_sizes(tmp_path: Path) -> None:
    def called(layers: int, *rows: int) -> Stack:
        torch._dynamo.reset()
        counters.clear()
        model, twin = twins(lambda: Stack(layers=layers))
        compiled = torch.compile(model, backend="chunkflow", fullgraph=True, dynamic=True, options=OPTIONS)
        for n in rows:
            x = torch.randn(n, 8)
            torch.testing.assert_close(compiled(x), twin(x))
        return model

    with fresh_cache():
        saved = chunkflow_compile.save(called(2, 4), tmp_path / "regions.zip")
    with fresh_cache():
        assert chunkflow_compile.load(tmp_path / "regions.zip") == saved
        called(3, 9, 5)
        found = counters["aot_autograd"]
        assert (found["autograd_cache_hit"], found["autograd_cache_miss"]) == (3, 0)


def test_the_plan_of_a_cycle_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def learn() -> Stack:
        torch._dynamo.reset()
        model, twin = twins(lambda: Stack(layers=3))
        chunkflow_compile.compile(model, **OPTIONS, lowering="eager")
        for step in range(4):
            x = torch.randn(4, 8) + step
            assert torch.equal(model(x), twin(x))
        return model

    with fresh_cache():
        torch.manual_seed(0)
        (first,) = chunkflow_compile.cycles(learn())
        monkeypatch.setattr(pipeline, "place", refuse_to_plan)
        torch.manual_seed(0)
        (second,) = chunkflow_compile.cycles(learn())
        assert second.cycle.plan == first.cycle.plan and second.measurements[-1].moved_bytes > 0


def spoil_a_name(plan: str) -> str:
    return plan.replace("device", "host", 1)


@pytest.mark.parametrize("spoil", [spoil_a_name, pytest.param(lambda _: "[" * 100_000, marks=pytest.mark.long)])
def test_a_plan_that_was_spoilt_is_made_again(
    spoil: Callable[[str], str], file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with fresh_cache():
        chunkflow_compile.load(file)
        (plan,) = Path(cache_dir(), "chunkflow_plans").iterdir()
        good = plan.read_text()
        plan.write_text(spoil(good))
        with caplog.at_level(logging.WARNING, logger="chunkflow_compile"):
            run(Stack())
        assert plan.read_text() == good
    assert sum("is ignored and made again" in record.message for record in caplog.records) == 1


def test_a_plan_of_another_budget_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    problem = cut_of(Stack(), torch.randn(4, 8), min_bytes=4096).problem
    settings = Settings(hardware=load_profile("cpu"), chunk_bytes=4096, cache=DiskPlans(tmp_path))
    large, small = (replace(settings, memory=memory) for memory in (10**6, 20_000))
    assert make_plan(problem, large).device_bytes > 20_000
    (file,) = tmp_path.iterdir()
    expected = make_plan(problem, small)
    assert expected.device_bytes <= 20_000
    (other,) = {*tmp_path.iterdir()} - {file}
    other.write_text(file.read_text())
    with caplog.at_level(logging.WARNING, logger="chunkflow_compile"):
        assert make_plan(problem, small) == make_plan(problem, small) == expected
    assert caplog.text.count("more than memory=19.5 KiB") == 1


Members = dict[str, bytes]
Manifest = dict[str, Any]


def tampered(members: Members, manifest: Manifest) -> None:
    members["region_1"] = members["region_1"][:-1] + b"!"


def of_another_release(members: Members, manifest: Manifest) -> None:
    manifest["torch"] = "2.0"


def leading_out_of_the_folder(members: Members, manifest: Manifest) -> None:
    members["../outside"] = members.pop("region_0")
    manifest.update(regions={"../outside": manifest["regions"]["region_0"]}, plans={})


@pytest.mark.parametrize(
    ("spoil", "said"),
    [(tampered, ""), (of_another_release, ""), (leading_out_of_the_folder, "'../outside' is no name of a region")],
)
def test_a_file_that_does_not_fit_is_ignored(
    spoil: Callable[[Members, Manifest], None], said: str, file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(members["manifest.json"])
    spoil(members, manifest)
    copy = tmp_path / "copy.zip"
    with zipfile.ZipFile(copy, "w") as archive:
        for name, blob in {**members, "manifest.json": json.dumps(manifest).encode()}.items():
            archive.writestr(name, blob)
    assert_ignored(copy, said, caplog)


def assert_ignored(path: Path, said: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="chunkflow_compile"):
        assert chunkflow_compile.load(path) == 0
    (record,) = caplog.records
    assert f"{path} is ignored: " in record.getMessage() and said in record.getMessage()


def test_a_file_that_is_cut_or_missing_is_ignored(file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    copy = tmp_path / "copy.zip"
    assert_ignored(copy, "", caplog)
    copy.write_bytes(file.read_bytes()[:-200])
    assert_ignored(copy, "", caplog)


def test_a_changed_byte_does_no_harm(file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    copy, raw, places = tmp_path / "copy.zip", file.read_bytes(), random.Random(0)
    ignored = 0
    with fresh_cache(), caplog.at_level(logging.WARNING, logger="chunkflow_compile"):
        for _ in range(25):
            place = places.randrange(len(raw))
            copy.write_bytes(raw[:place] + bytes([raw[place] ^ (1 << places.randrange(8))]) + raw[place + 1 :])
            caplog.clear()
            found = chunkflow_compile.load(copy)
            assert (found, len(caplog.records)) in ((3, 0), (0, 1)), f"byte {place}"
            ignored += found == 0
    assert ignored > 12


def test_other_settings_and_instructions_do_not_find_them(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with fresh_cache():
        assert chunkflow_compile.load(file) == 3
        assert run(Stack(), inductor={"max_fusion_size": 1}) == (0, 3)
        monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", lambda: cpu_vec_isa.invalid_vec_isa)
        assert run(Stack()) == (0, 3)
        assert chunkflow_compile.load(file) == 0
    assert "it was saved with instructions" in caplog.text and "here it is INVALID_VEC_ISA" in caplog.text


def test_without_caches_a_file_is_ignored(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    with config.patch(force_disable_caches=True):
        assert chunkflow_compile.load(file) == 0
    assert "caches are switched off" in caplog.text


def test_the_oldest_plans_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "MOST_PLANS", 3)
    plans = plan_cache.DiskPlans(tmp_path)
    for number in range(5):
        plans.put(str(number), "{}")
        os.utime(plans._path(str(number)), (number, number))
    assert {*tmp_path.iterdir()} == {plans._path(str(number)) for number in (2, 3, 4)}


def test_several_processes_write_one_path(file: Path, tmp_path: Path) -> None:
    model = Stack()
    with fresh_cache():
        assert chunkflow_compile.load(file) == 3
        run(model)
        with ThreadPoolExecutor(4) as pool:
            assert [*pool.map(partial(chunkflow_compile.save, model), [tmp_path / "regions.zip"] * 4)] == [3] * 4
        assert [path.name for path in tmp_path.iterdir()] == ["regions.zip"]
        assert chunkflow_compile.load(tmp_path / "regions.zip") == 3
        with pytest.raises(ChunkflowError, match="cannot be written: No such file"):
            chunkflow_compile.save(model, tmp_path / "none" / "regions.zip")


def test_a_model_that_was_not_called_has_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(ChunkflowError, match=r"nothing to save: Stack has run no program.* call it once"):
        chunkflow_compile.save(Stack(), tmp_path / "regions.zip")
    assert not [*tmp_path.iterdir()]
