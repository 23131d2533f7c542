"""The README's table by GPU, its charts and the page methods.md show the figures of their JSON files, under their labels."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import activations
import gpu
import methods
import pytest
import readme_gpus
import readme_table
import torch
from methods import (
    BENCHMARKS,
    CHART,
    CHUNKFLOW,
    GPUS,
    GROUP,
    MEASURED,
    MODELS,
    PAGE,
    PLAIN,
    PLANNED,
    all_rows,
    groups,
    in_chart,
    measured,
    pair,
    plan,
    planned,
    table,
)
from readme_table import README, chart_data, digest, written

from chunkflow_compile.catalog.presets import Workload, preset
from chunkflow_compile.passes.errors import ChunkflowError

NAMES = {title: model for model, title in MODELS.items()}
GIB = 1 << 30


def test_the_readme_and_the_page_are_not_stale() -> None:
    """If one is: make readme-table."""
    assert README.read_text() == written(README.read_text(), readme_gpus.planned())
    assert PAGE.read_text() == methods.page(all_rows())
    assert all(chart.read_bytes().startswith(b"\x89PNG") for chart in (CHART, readme_table.CHART))


def test_every_model_on_every_gpu() -> None:
    rows = readme_gpus.planned()
    assert [(row.workload.model, row.gpu) for row in rows] == [*readme_gpus.cases()]
    for row in rows:
        known, ways, budget = preset(row.workload.model), row.ways, row.on.budget * GIB
        assert row.workload == known.workload(), "as the pipeline calls it"
        assert row.host_packed < 0.8 * row.host and row.on.budget < row.on.memory
        assert row.fits(CHUNKFLOW) is (row.least <= budget)
        if row.fits(CHUNKFLOW):
            assert ways[CHUNKFLOW].nbytes == budget
            assert ways[PLAIN].forward_s <= 1.0001 * ways[CHUNKFLOW].forward_s
        if readme_gpus.IN_ITS_MEMORY in ways:
            same = ways[readme_gpus.IN_ITS_MEMORY]
            assert (
                same.nbytes == max(row.least, ways[GROUP].nbytes) and same.forward_s <= 1.001 * ways[GROUP].forward_s
            ), row
        assert [nbytes for nbytes, _ in row.curve] == sorted({nbytes for nbytes, _ in row.curve})
        times = [forward_s for _, forward_s in row.curve]
        assert all(after <= 1.01 * before for before, after in pairwise(times)), row
        short = row.host > readme_gpus.HOST_OF_32_GB and row.gpu == readme_gpus.EXAMPLE and row.fits(CHUNKFLOW)
        assert (readme_gpus.ON_SSD in ways) is short
        if short:
            assert ways[readme_gpus.ON_SSD].forward_s >= 0.999 * ways[CHUNKFLOW].forward_s


def cells(part: str, head: list[str]) -> list[list[str]]:
    """The rows of the table in ``part`` of the README that has this head."""
    lines = [[c.strip() for c in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("|")]
    begin = next(k for k, line in enumerate(lines) if line[: len(head)] == head)
    return [line for line in lines[begin + 2 :] if len(line) == len(lines[begin])]


GPU_PART = "<!-- gpus: make readme-table -->"


def test_every_label_of_the_table_by_gpu_is_of_its_row() -> None:
    """Read from the README, and compared with the JSON as it is: the GPU, the model, the budget, forwards and steps."""
    part = README.read_text().split(GPU_PART)[1].split("<!-- end -->")[0]
    bodies = json.loads(readme_gpus.PLANNED.read_text())
    rows = cells(part, ["GPU", "model", "`memory=`", "forward", "step", "fastest with", "group offload"])
    shown = [row for row in rows if row[-1] == "planned"]
    assert len(shown) == len(bodies) and {row[-1] for row in rows} == {"planned", "measured"}
    for row, body in zip(shown, bodies, strict=True):
        on, ways, forwards = readme_gpus.GPUS[body["gpu"]], body["ways"], body["workload"]["forwards"]
        assert row[0] == f"{on.memory} GB: {on.name}" and NAMES[row[1]] == body["workload"]["model"]
        if CHUNKFLOW not in ways:
            assert row[2] == f"needs {body['least'] / GIB:.1f} GiB" and row[3] == row[4] == ""
            continue
        assert row[2] == f"{on.budget} GiB"
        forward_s, step_s = (float(re.sub(r"[* s]", "", cell)) for cell in row[3:5])
        assert forward_s == pytest.approx(ways[CHUNKFLOW]["forward_s"], rel=0.02)
        assert step_s == pytest.approx(forwards * ways[CHUNKFLOW]["forward_s"], rel=0.02)
        if row[5]:
            best_s, options = re.fullmatch(r"\*\*([\d.]+) s\*\*, `(.*)`", row[5]).groups()
            assert float(best_s) == pytest.approx(forwards * ways[options]["forward_s"], rel=0.02)
        able = [
            ways[way]["forward_s"] for way in (readme_gpus.HOISTED, readme_gpus.PACKED, readme_gpus.BOTH) if way in ways
        ]
        assert bool(row[5]) is (min(able) <= readme_gpus.WORTH * ways[CHUNKFLOW]["forward_s"])
        for cell, way in ((row[6], GROUP), (row[8], readme_gpus.MODEL)):
            gib = f"{ways[way]['nbytes'] / GIB:.1f} GiB"
            assert cell.endswith(gib) and cell.startswith("needs") is (ways[way]["nbytes"] > on.budget * GIB)


def test_every_label_of_the_table_of_models_is_of_its_workload() -> None:
    part = README.read_text().split(GPU_PART)[1].split("<!-- end -->")[0]
    workloads = {body["workload"]["model"]: body for body in json.loads(readme_gpus.PLANNED.read_text())}
    rows = cells(part, ["model", "output", "one timestep per", "forwards per step", "host memory"])
    assert [NAMES[row[0]] for row in rows] == [*MODELS]
    for row in rows:
        body = workloads[NAMES[row[0]]]
        assert (
            labels(*row[:4], "", "")[0]
            == labelled(body["workload"])
            == labelled(asdict(preset(NAMES[row[0]]).workload()))
        )
        assert row[4:6] == [f"{body[host] / GIB:.1f} GiB" for host in ("host", "host_packed")]


def test_every_label_of_the_table_of_several_gpus_is_of_its_case() -> None:
    """The model, the output, the forwards and the times are of one case of several_gpus.json."""
    part = README.read_text().split("<!-- several: make readme-table -->")[1].split("<!-- end -->")[0]
    body = json.loads(readme_table.SEVERAL.read_text())
    rows = cells(part, ["GPUs", "model", "output", "forwards per step"])
    machines = {name: machine for machine, name in readme_table.SEVERAL_GPUS.items()}
    assert {row[0] for row in rows} == {*machines} and len({(row[0], row[1]) for row in rows}) == len(rows)
    for gpus, model, output, forwards, ours, group, everything, how in rows:
        timestep = next(preset(name).timestep for name, shown in MODELS.items() if shown == model)
        said = labels(model, output, timestep, forwards, "", "")[0]
        title = next(title for title, workload in body["workloads"].items() if labelled(workload) == said)
        ways, memory = (
            body["machines"][machines[gpus]]["models"][title]["ways"],
            body["machines"][machines[gpus]]["card, GB"],
        )
        for cell, names in ((ours, [n for n in ways if n.startswith(readme_table.OURS)]), (group, ["group-offload"])):
            found = [
                way for way in (ways[n] for n in names) if isinstance(way, dict) and cell.endswith(f", {way['GB']} GB")
            ]
            times = [float(cell.split()[0]) / int(forwards) for _ in found]
            assert any(
                1e3 * time == pytest.approx(way["ms"], rel=0.02) for time, way in zip(times, found, strict=True)
            ), cell
            assert all(way["GB"] < memory for way in found)
        assert everything.endswith(f"{ways['resident']['GB']} GB") and how == "planned"
        assert everything.startswith("needs") is (ways["resident"]["GB"] > memory)


def test_the_first_figures_are_of_their_rows() -> None:
    text = " ".join(README.read_text().split("<!-- figures: make readme-table -->")[1].split("<!-- end -->")[0].split())
    found = re.search(r"^FLUX.1-dev in bfloat16 \((\S+)\) on a (\d+) GB (.+?) is planned at \*\*(\S+) s per step", text)
    assert found is not None, text
    body = next(
        body
        for body in json.loads(readme_gpus.PLANNED.read_text())
        if (body["workload"]["model"], body["gpu"]) == ("flux.1-dev", found[3])
    )
    assert found[1] == "1024x1024" and int(found[2]) == readme_gpus.GPUS[found[3]].memory
    assert float(found[4]) == pytest.approx(
        body["workload"]["forwards"] * body["ways"][CHUNKFLOW]["forward_s"], rel=0.02
    )
    arms = json.loads((BENCHMARKS / "h100.json").read_text())["cases"][MEASURED[1][1]]["record"]["arms"]
    for arm in ("chunkflow@50%", "inductor"):
        assert f"{1e3 * arms[arm]['step_s']:.0f} ms" in text.split("Measured on one H100")[1]


def test_every_label_of_the_charts_is_of_its_rows() -> None:
    """One chart per model, a curve per GPU; no label contains a private word."""
    rows = readme_gpus.planned()
    data = chart_data(rows)
    names = {readme_table.label(name): name for name in readme_gpus.GPUS}
    assert [NAMES[title.split(",")[0]] for title in data] == [*MODELS]
    for title, panel in data.items():
        found = re.fullmatch(r"(.+?), (.+), one timestep per (\w+), (\d) forwards? per step", title)
        assert found is not None, title
        for name, curve in panel["curves"].items():
            row = next(r for r in rows if (MODELS[r.workload.model], r.gpu) == (found[1], names[name]))
            assert labels(*found.groups(), "", "")[0] == labelled(asdict(row.workload))
            assert curve[-1] == (row.on.budget, pytest.approx(int(found[4]) * row.ways[CHUNKFLOW].forward_s, rel=1e-5))
        said = [title, *panel["curves"], *(way for _, way, _, _ in panel["points"])]
        assert not re.search(r"\b(card|link|plain|drive|room|kind|beside)\b", " ".join(said))
    points = data[next(iter(data))]["points"]
    assert [step_s for _, way, _, step_s in points if way == "measured"] == [
        pytest.approx(row.ways[CHUNKFLOW].forward_s) for row in readme_table.measured()
    ]


def test_measured_activations_on_their_page_are_of_the_records() -> None:
    """Read from the page, and computed from the JSON as it is; its predictions take a minute: activations.py."""
    shown = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in activations.PAGE.read_text()
        .partition(activations.BEGIN)[2]
        .partition(activations.END)[0]
        .splitlines()
    ][2:]
    found = [
        (
            gpu,
            case["workload"]["model"],
            f"`{arm}`",
            f"{(record['peak_bytes'][arm] - found['weights_device_bytes']) / 2**20:,.0f}",
        )
        for page, gpu in activations.GPUS.items()
        for case in json.loads((BENCHMARKS / f"{page}.json").read_text())["cases"].values()
        for record in (case["record"],)
        for arm, found in record["arms"].items()
        if found["weights_device_bytes"] is not None
    ]
    assert [(gpu, model, arm, nbytes) for gpu, model, _, arm, nbytes, *_ in shown] == found
    for *_, measured_mib, finest, blocks, finest_ratio, blocks_ratio in shown:
        for mib, ratio in ((finest, finest_ratio), (blocks, blocks_ratio)):
            assert float(ratio) == pytest.approx(int(mib) / int(measured_mib), abs=0.01)


def test_a_changed_row_is_a_stale_readme() -> None:
    """Another time, budget, number of forwards or form of the timestep: the README and the charts differ."""
    rows, text = readme_gpus.planned(), README.read_text()
    row = next(row for row in rows if row.gpu == "RTX 4080" and row.workload.model == "qwen-image")
    slower = replace(row.ways[CHUNKFLOW], forward_s=2 * row.ways[CHUNKFLOW].forward_s)
    for changed in (
        replace(row, ways={**row.ways, CHUNKFLOW: slower}, curve=[(n, 2 * s) for n, s in row.curve]),
        replace(row, workload=replace(row.workload, forwards=1)),
    ):
        others = [changed if each is row else each for each in rows]
        assert written(text, others) != text and digest(others) != digest(rows)


def test_every_case_of_the_page_is_planned() -> None:
    rows = planned()
    assert [(row.workload, row.gpus) for row in rows] == [*methods.cases()]
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
    """What labels claim, as :func:`recorded` returns it."""
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
    lines = (line for line in text.splitlines() if line.startswith("|"))
    head, _, *rows = ([c.strip() for c in line.strip("|").split("|")] for line in lines)
    assert head[:5] == ["model", "output", "one timestep per", "forwards per step", "GPU"]
    return [labels(*row[:5], row[-1]) for row in rows]


def test_every_label_of_the_page_is_of_the_case_that_was_run_or_planned() -> None:
    shown = table_labels(PAGE.read_text())
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


def test_every_label_of_the_first_lines_of_the_page_is_of_its_case() -> None:
    """The forward that was measured, and the one that the pipeline runs; each figure stands beside its own label."""
    first = " ".join(PAGE.read_text().split("\n![")[0].splitlines())
    form = r"\(((?:\d+ frames of )?\d+x\d+), one timestep per (\w+)\)"
    found = re.search(
        rf"Measured on \[one (.+?)\]\((\w+)\.md\).* one forward of ([\w. -]+) {form} takes (.+?) "
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
            assert " and ".join(methods.figures(row.ways[way])) in said, way


def test_every_label_of_the_chart_of_the_page_is_of_its_case() -> None:
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
    assert methods.digest([row]) != methods.digest([before])


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
def test_the_planner_predicts_the_same_row_still() -> None:
    """If it does not: make readme-table PLAN=--plan."""
    old = next(row for row in readme_gpus.planned() if (row.workload.model, row.gpu) == ("flux.1-dev", "RTX 4060 Ti"))
    new = readme_gpus.plan(readme_gpus.Planned("flux.1-dev"), "RTX 4060 Ti")
    assert (new.least, new.host, new.host_packed) == (old.least, old.host, old.host_packed)
    for name, way in new.ways.items():
        assert (way.forward_s, way.nbytes) == (pytest.approx(old.ways[name].forward_s, rel=1e-4), old.ways[name].nbytes)


@pytest.mark.long
def test_the_planner_predicts_the_same_forwards_still() -> None:
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
    with pytest.raises(
        ChunkflowError, match=r"gpus.json is missing: it contains the planned rows. Write it again with --plan"
    ):
        readme_gpus.planned(tmp_path / "gpus.json")
    with pytest.raises(
        ChunkflowError, match=r"The planned rows lack flux.1-dev on the RTX 4060 Ti. Plan them with --plan"
    ):
        written(README.read_text(), [])
    with pytest.raises(
        ChunkflowError, match=r"gpus.json is missing: it contains the plans for several GPUs. Write it again"
    ):
        readme_table.several(tmp_path / "several_gpus.json")
    with pytest.raises(ChunkflowError, match=r"README.md has no place for the figures: add the lines <!-- figures"):
        written("# ChunkFlow\n", readme_gpus.planned())
    with pytest.raises(ChunkflowError, match=r"The planned forwards lack the measured one as the pipeline calls it"):
        pair(measured())
    before = README.read_bytes()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert readme_table.main([]) == 2
    assert "A picture needs matplotlib" in capsys.readouterr().err and README.read_bytes() == before
