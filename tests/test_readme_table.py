"""The chart and the table of the README are what the GPUs' pages and the planner say, and their labels are of these cases."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gpu
import pytest
import readme_table
import torch
from readme_table import (
    BENCHMARKS,
    CHART,
    CHUNKFLOW,
    GPUS,
    GROUP,
    MEASURED,
    MODELS,
    PLAIN,
    PLANNED,
    README,
    all_rows,
    groups,
    in_chart,
    measured,
    pair,
    plan,
    planned,
    table,
    written,
)

from chunkflow_compile.catalog.presets import Workload, preset
from chunkflow_compile.passes.errors import ChunkflowError

NAMES = {title: model for model, title in MODELS.items()}


def test_the_readme_is_not_stale() -> None:
    """If it is: make readme-table."""
    assert README.read_text() == written(README.read_text(), all_rows())
    assert CHART.read_bytes().startswith(b"\x89PNG")


def test_every_model_on_every_card() -> None:
    rows = planned()
    assert [(row.workload, row.gpus) for row in rows] == [*readme_table.cases()]
    for row in rows:
        ours, group, plain = (row.ways[way] for way in (CHUNKFLOW, GROUP, PLAIN))
        assert ours.nbytes <= min(row.available, plain.nbytes) and ours.forward_s <= group.forward_s * 1.001, row
        assert plain.forward_s <= ours.forward_s * 1.000001
        assert row.fits(PLAIN) is (plain.nbytes <= (GPUS[row.gpus].nominal_gib - 1) * 2**30)


def recorded() -> Iterator[tuple[dict[str, Any], str, str]]:
    """The workload of each case that was run or planned, its GPUs, and which of both; as the files have them."""
    for page, case, gpus, arms in MEASURED:
        body = json.loads((BENCHMARKS / f"{page}.json").read_text())["cases"][case]
        sizes, said = body["workload"]["sizes"], body["says"][0]
        edges = f"{sizes['height']}x{sizes['width']}"
        assert said.startswith(f"{body['workload']['model']}, ") and edges in said, "what the run itself wrote"
        assert ("frames" not in said) if sizes["frames"] == 1 else f"{sizes['frames']} frames of {edges}" in said
        for _ in arms:
            yield body["workload"], gpus, "measured"
    for body in json.loads(PLANNED.read_text()):
        yield body["workload"], body["gpus"], body["how"]


def labels(model: str, output: str, form: str, forwards: str, gpus: str, how: str) -> tuple[dict[str, Any], str, str]:
    """What labels of the README claim, as :func:`recorded` has it."""
    found = re.fullmatch(r"(?:(\d+) frames of )?(\d+)x(\d+)", output)
    assert found is not None, output
    frames, height, width = (int(n or 1) for n in found.groups())
    sizes = {"frames": frames, "height": height, "width": width}
    return {"model": NAMES[model], **sizes, "timestep": form, "forwards": int(forwards)}, gpus, how


def labelled(workload: dict[str, Any]) -> dict[str, Any]:
    """What of a workload the labels show."""
    shown = {name: workload["sizes"][name] for name in ("frames", "height", "width")}
    return {"model": workload["model"], **shown, "timestep": workload["timestep"], "forwards": workload["forwards"]}


def table_labels(text: str) -> list[tuple[dict[str, Any], str, str]]:
    part = text.split("<!-- table:")[1].split("<!-- end -->")[0]
    lines = (line for line in part.splitlines() if line.startswith("|"))
    head, _, *rows = ([c.strip() for c in line.strip("|").split("|")] for line in lines)
    assert head[:5] == ["model", "output", "one timestep per", "forwards per step", "GPU"]
    return [labels(*row[:5], row[-1]) for row in rows]


def test_every_label_of_the_table_is_of_the_case_that_was_run_or_planned() -> None:
    shown = table_labels(README.read_text())
    cases = [(labelled(workload), gpus, how) for workload, gpus, how in recorded()]
    assert len(shown) == len(cases) == len(all_rows()) and all(case in shown for case in cases)
    assert [(labelled(asdict(row.workload)), row.gpus, row.how) for row in all_rows()] == shown, (
        "in the order of figures"
    )
    for workload, gpus, how in cases:
        known = preset(workload["model"])
        assert workload["forwards"] == known.forwards
        if how == "planned":
            assert workload["timestep"] == known.timestep, "as the pipeline calls it"
            usual = workload["frames"] == known.sizes.frames
            assert usual or (replace_timestep(workload), gpus, "measured") in cases, "an unusual length has a reason"


def replace_timestep(workload: dict[str, Any]) -> dict[str, Any]:
    """The same with the other form."""
    return {**workload, "timestep": {"token": "sample", "sample": "token"}[workload["timestep"]]}


def test_every_label_of_the_first_lines_is_of_its_case() -> None:
    """The forward that was measured, and the one that the pipeline runs; each figure stands beside its own label."""
    first = " ".join(README.read_text().splitlines()[:11]).split("<!-- chart:")[1]
    form = r"\(((?:\d+ frames of )?\d+x\d+), one timestep per (\w+)\)"
    found = re.search(
        rf"Measured on \[one (.+?)\]\(docs/benchmarks/(\w+)\.md\).* one forward of ([\w. -]+) {form} takes (.+?) "
        rf"The pipeline of this model passes one timestep per (\w+) and runs (\d) forwards per step: "
        rf"such a forward {form} is planned, not measured, at (.+?);",
        first,
    )
    assert found is not None, first
    gpus, page, model, output, run_form, run_figures, form, forwards, output_called, called_form, called_figures = (
        found.groups()
    )
    run, called = pair(all_rows())
    assert run in measured() and called in planned() and MEASURED[0][0] == page
    assert (labelled(asdict(run.workload)), run.gpus, run.how) == labels(
        model, output, run_form, forwards, gpus, "measured"
    )
    assert (labelled(asdict(called.workload)), called.gpus, called.how) == labels(
        model, output_called, called_form, forwards, gpus, "planned"
    )
    assert form == called_form != run_form
    for row, said in ((run, run_figures), (called, called_figures)):
        for way in (CHUNKFLOW, PLAIN, GROUP):
            assert " and ".join(readme_table._figures(row.ways[way])) in said, way


def test_every_label_of_the_chart_is_of_its_case() -> None:
    rows, bars = in_chart(all_rows()), groups(in_chart(all_rows()))
    told = {}
    for title, ways in bars.items():
        found = re.fullmatch(r"(.+), (.+), one timestep per (\w+), (\d) forwards? per step, (.+): (\w+)", title)
        assert found is not None, title
        told[title] = labels(*found.groups())
        for name, way in ways.items():
            mine = [row for row in rows if (labelled(asdict(row.workload)), row.gpus, row.how) == told[title]]
            assert any(row.ways[name.partition(",")[0]] == way for row in mine), (title, name)
            if name.startswith(CHUNKFLOW):
                assert name == f"{CHUNKFLOW}, {way.nbytes / 2**30:.1f} GiB"
    assert sum(len(ways) for ways in bars.values()) == sum(len(mine) for mine in ARMS)
    assert all(any(case == (labelled(w), gpus, how) for w, gpus, how in recorded()) for case in told.values())


# The bars of the H200: measured, and planned as the pipeline calls the model; of the H100.
ARMS = ((PLAIN, GROUP, CHUNKFLOW), (PLAIN, GROUP, CHUNKFLOW), (PLAIN, GROUP, *[CHUNKFLOW] * 3))


@pytest.mark.parametrize("changed", [{"timestep": "token"}, {"forwards": 1}, {"frames": 33}], ids=str)
def test_a_label_follows_its_case(changed: dict[str, Any], tmp_path: Path) -> None:
    """What a file records is what is shown: nothing is typed twice."""
    for page in ("h100", "h200"):
        shutil.copy(BENCHMARKS / f"{page}.json", tmp_path)
    file = tmp_path / "h200.json"
    body = json.loads(file.read_text())
    workload = body["cases"][MEASURED[0][1]]["workload"]
    (workload["sizes"] if "frames" in changed else workload).update(changed)
    file.write_text(json.dumps(body))
    (row, *_), (before, *_) = measured(tmp_path), measured()
    assert groups([row]) != groups([before]) and table([row]) != table([before])
    assert readme_table.digest([row]) != readme_table.digest([before])


def test_the_next_gpu_measures_the_call_that_the_pipeline_makes(tmp_path: Path) -> None:
    """Its page records the workload, and a case of another form is another case."""
    page = gpu.Page(tmp_path / "gpu.md", torch.device("cpu"), dry=False, append=False)
    for case in gpu.CASES:
        page.add(case, ["Not measured."])
    found = json.loads((tmp_path / "gpu.json").read_text())["cases"]
    assert len(found) == len(gpu.CASES)
    for body in found.values():
        workload = Workload.from_json(body["workload"])
        assert workload == preset(workload.model).workload(workload.sizes)
    assert not {case for _, case, _, _ in MEASURED[:1]} & found.keys(), "the H200's has one timestep per sample"


@pytest.mark.long
def test_the_planner_says_so_still() -> None:
    """If it does not: make readme-table PLAN=--plan."""
    workload = preset("wan2.2-ti2v-5b").workload()
    old = {row.gpus: row for row in planned() if row.workload == workload}
    for row in plan(workload, 1):
        for name, way in row.ways.items():
            assert way.forward_s == pytest.approx(old[row.gpus].ways[name].forward_s, rel=1e-4)
            assert way.nbytes == old[row.gpus].ways[name].nbytes


def test_what_is_missing_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ChunkflowError, match=r"h200\.json is missing: it has what was measured on the H200"):
        measured(tmp_path)
    shutil.copy(BENCHMARKS / "h100.json", tmp_path / "h200.json")
    with pytest.raises(ChunkflowError, match=r"h200\.json has no case 'wan2.2-ti2v-5b, frames 81'; it has flux"):
        measured(tmp_path)
    with pytest.raises(
        ChunkflowError, match=r"planned.json is missing: it has the planned forwards. Write it again with --plan"
    ):
        planned(tmp_path / "planned.json")
    with pytest.raises(ChunkflowError, match=r"README.md has no place for the chart: put <!-- chart"):
        written("# ChunkFlow\n", all_rows())
    with pytest.raises(ChunkflowError, match=r"The planned forwards lack the measured one as the pipeline calls it"):
        pair(measured())
    before = README.read_bytes()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert readme_table.main([]) == 2
    assert "A picture needs matplotlib" in capsys.readouterr().err and README.read_bytes() == before
