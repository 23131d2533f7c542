"""Bad use of the command line: one sentence in the words of the user, exit code 2, and before a model is traced."""

from __future__ import annotations

import shlex
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
from conftest import HERE, MODEL, SIZES
from torch.multiprocessing.spawn import ProcessRaisedException

from chunkflow_compile.bench import ranks
from chunkflow_compile.cli import pipeline, planning_arguments
from chunkflow_compile.cli.main import main
from chunkflow_compile.cli.output import called
from chunkflow_compile.hardware.machine import install_line
from chunkflow_compile.passes.errors import ChunkflowError

OWN = "examples/ulysses_dit.py:planned"
ULYSSES = f"{HERE / 'two_blocks.py'}:ulysses"


@pytest.fixture(autouse=True)
def no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a command takes two seconds, and so shows progress, depends on the machine."""
    monkeypatch.setenv("CHUNKFLOW_PROGRESS", "0")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["demo", "--layers", "0"], "--layers, --frames and --steps must be at least 1"),
        (["demo", "--json", "/nowhere/f.json"], "cannot be written to /nowhere/f.json: [Errno 2] No such file or"),
        (["demo", "--dump", "/proc/nowhere"], "The folder /proc/nowhere cannot be written: No such file"),
        (
            ["plan", MODEL, "--memry", "4GiB"],
            "plan has no option --memry; did you mean --memory? chunkflow plan --help ",
        ),
        (["plan", MODEL, "--zzz=1"], "chunkflow plan has no option --zzz. chunkflow plan --help lists its options."),
        (
            ["--versoin"],
            "chunkflow has no option --versoin; did you mean --version? chunkflow --help lists its options.",
        ),
        (["hardware", "rtx-4090"], "chunkflow hardware takes no further argument 'rtx-4090'. "),
        (["plan", "wan3"], "no preset 'wan3': use one of wan2.2-ti2v-5b, "),
        (["plan", "nothing.py:build"], "There is no file 'nothing.py': write the model as file.py:function"),
        (["plan", "examples/ulysses_dit.py:build"], "has no function 'build'"),
        (["plan", "examples/ulysses_dit.py"], "name the function in it that returns the model"),
        (["plan", OWN, "--frames", "5"], "--frames is a size of a preset"),
        (["plan", OWN, "--curve", "--memory", "1GiB"], "--curve covers all budgets"),
        (["plan", MODEL, "--pack"], "--pack packs contiguous weights of bfloat16, each read by one region, and "),
        (["dump", MODEL, "--pack", "--stage", "regions"], "has none: leave it out, or give a model in bfloat16"),
        (
            ["plan", OWN, "--pack", "auto"],
            "--pack auto chooses for a budget: give --memory or --weight-memory, or --pack for all",
        ),
        (
            ["plan", "tests/two_blocks.py:ulysses", "--ulysses", "2", "--exchange-groups", "5"],
            "5 groups do not divide the 2 attention heads of each rank",
        ),
        (["simulate", OWN, "--pack", "--policy", "resident"], "--pack with policy resident, which copies nothing"),
        (["simulate", OWN, "--peers", "--policy", "resident"], "--peers with policy resident, which copies nothing"),
        (["simulate", OWN, "--pack", "--policy", "fsdp"], "--pack with policy fsdp, which has weights as they are"),
        (["simulate", OWN, "--policy", "distributed-layerwise"], "splits each block among ranks: give --ulysses 2 or"),
        (
            ["bench", "contention", "--arms", "group-offload"],
            "--arms: group-offload is only predicted, by chunkflow simulate; it does not",
        ),
        (
            ["bench", "contention", "--arms", "fsdp"],
            "--arms: fsdp is only predicted, by chunkflow simulate; it does not",
        ),
        (
            ["bench", "contention", "--arms", "host-yield"],
            "--arms: host-yield is only predicted, by chunkflow simulate; it does not",
        ),
        (
            ["plan", OWN, "--peers"],
            "--peers: there is one rank only, so there are no other devices: it takes a Ulysses deg",
        ),
        (
            ["why", OWN, "x", "--ulysses", "2", "--hardware", "l40s-pcie", "--peers"],
            "--peers: l40s-pcie has no peer_band",
        ),
        (
            ["simulate", OWN, "--ulysses", "8", "--nodes", "2", "--hardware", "h200", "--peers"],
            "--peers: the 8 ranks are on several machines, 4 on each, and pulls stay inside a machine. Leave it out.",
        ),
        (
            ["plan", OWN, "--ulysses", "2", "--hardware", "gh200", "--peers"],
            "copies 360 GB/s from host memory. Leave it",
        ),
        (["plan", "flux.1-dev", "--ulysses", "5"], "24 attention heads: the Ulysses degree 5 must divide them"),
        (["plan", "flux.1-dev", "--cfg-parallel", "2"], "but a step of flux.1-dev is 1 call. Leave it out where"),
        (["why", "wan2.2-ti2v-5b", "x", "--cfg-parallel", "3"], "3: classifier-free guidance has 2 branches"),
        (
            ["plan", ULYSSES, *SIZES, "--ulysses", "2", "--cfg-parallel", "2", "--forwards", "2"],
            "collectives of 4 ranks, but a branch of classifier-free guidance has 2: they would mix the branches",
        ),
        (
            ["timeline", "nothing.json", "--cfg-parallel", "2", "--out", "x.png"],
            "--cfg-parallel is an option of a model",
        ),
        (["plan", "flux.1-dev", "--memory", "3 apples"], "--memory '3 apples' is not a size"),
        (["plan", "flux.1-dev", "--slowdown", "0.9"], "--slowdown 0.9 is below 1"),
        (["plan", "flux.1-dev", "--hardware", "tpu"], "no hardware profile 'tpu'; the nearest are cpu, "),
        (
            ["plan", "flux.1-dev", "--hardware", "rtx-4090-pcie", "--attention", "fa3"],
            "no attention by fa3: it has fa2",
        ),
        (["simulate", "flux.1-dev", "--ulysses", "8", "--nodes", "3"], "--nodes 3 does not divide --ulysses 8: a node"),
        (
            ["simulate", "wan2.2-ti2v-5b", "--ulysses", "2", "--cfg-parallel", "2", "--nodes", "2"],
            "--nodes with --cfg-parallel: which ranks share a node is not known",
        ),
        (
            ["simulate", "flux.1-dev", "--sweep-ulysses", "2", "--policy", "layerwise"],
            "leave out --ulysses and --policy",
        ),
        (["simulate", "flux.1-dev", "--sweep-ulysses", "one"], "--sweep-ulysses one: give degrees, such as 1,2,4,8"),
        (["simulate", "flux.1-dev", "--sweep-ulysses", "1,5"], "the Ulysses degree 5 must divide them"),
        (["plan", "flux.1-dev", "--json", "/nowhere/plan.json"], "cannot be written to /nowhere/plan.json"),
        (["plan", MODEL, "--hardware", "cpu", "--min-bytes", "0", "--memory", "1KiB"], "Give --memory '"),
        (["simulate", "wan2.2-ti2v-5b", "--frames", "80"], "frames 80 is not 4 k + 1"),
        (["simulate", OWN, "--forwards", "0"], "--forwards must be at least 1"),
        (["dump", MODEL, "--stage", "verifed"], "no stage 'verifed'; did you mean 'verified'? The stages are traced, "),
        (["dump", MODEL, "--disable-pass", "shared"], "no pass 'shared' that can be disabled; did you mean 'sharing'?"),
        (["dump", MODEL, "--disable-pass", "rewrite"], "later passes need all others"),
        (["dump", MODEL, "--out", "/proc/nowhere"], "/proc/nowhere cannot be written"),
        (["dump", MODEL, "--json", "/nowhere/x"], "cannot be written to /nowhere/x"),
        (["dump", f"{HERE / 'two_blocks.py'}:nothing"], "has no function 'nothing'"),
        (["dump", f"{HERE / 'two_blocks.py'}:untraceable"], "untraceable cannot be traced: "),
        (["why", MODEL, "blocks.0", *SIZES], "is part of 2 names; use a longer part:\n  blocks.0.up.weight"),
        (["why", MODEL, "ffn", *SIZES], "No weight has 'ffn' in its name; the nearest are "),
        (["why", MODEL, "", *SIZES], "is part of 8 names"),
        (["timeline", MODEL, "--out", "x.gif"], "use one of .png, .svg, .json"),
        (["timeline", "nothing.json", "--out", "x.png"], "The plan nothing.json cannot be read"),
        (["timeline", str(HERE / "slow_compute.json"), "--out", "x.png"], "This is not a ChunkFlow plan"),
        (["timeline", MODEL, "--blocks", "0", "--out", "x.png"], "--blocks must be at least 1"),
        (["bench", "contention", "--arms", "resident,fast"], "there is no arm 'fast'. Use resident, layerwise"),
        (["bench", "contention", "--arms", "layerwise-prefix"], "there is no arm 'layerwise-prefix'"),
        (["bench", "contention", "--arms", "resident@40%"], "there is no arm 'resident@40%'"),
        (["bench", "contention", "--arms", "chunkflow@x"], "'x' is not a share of the blocks; write chunkflow@40%"),
        (["bench", "contention", "--arms", "resident,resident"], "--arms resident,resident names an arm twice"),
        (["bench", "compute-bound"], "There is no regime 'compute-bound': give one of compute-rich, contention"),
        (["bench", "own.py:build"], "A model of your own needs a link: give --load 0.7"),
        (["bench", "contention", "--load", "0"], "--load must be above 0 and at most 10"),
        (["bench", "contention", "--pace", "0.5"], "--pace must be 0, or from 1 to 10, not 0.5"),
        (["bench", "contention", "--steps", "0"], "--steps and --ranks must be at least 1"),
        (["bench", "contention", "--arms", "inductor"], "--arms inductor: measured on a GPU only, with --device cuda"),
        (["bench", "contention", "--frames", "9"], "--frames is a size of a preset; contention has its own"),
        (["bench", "flux.1-dev"], "Presets, --transport loopback and --hardware need --device cuda"),
        (["bench", "contention", "--bandwidth", "fast"], "--bandwidth 'fast' is not a size"),
        (["bench", "contention", "--bandwidth", "1"], "--bandwidth '1' is 1 bytes/s, which no link or drive has: give"),
        (["bench", "contention", "--picture", "/nowhere/p.png"], "cannot be written to /nowhere/p.png"),
        (["explain", "/nowhere"], "There is no folder /nowhere"),
        (["explain", str(HERE)], "holds no measured program: call the compiled model"),
    ],
)
def test_bad_use_is_one_sentence_and_exit_code_2(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert sentence in shown.err and "Traceback" not in shown.err and not shown.out


PLAN = ["plan", "flux.1-dev"]
BEFORE_TRACING: list[tuple[list[str], str]] = [
    ([*PLAN, "--drive", "7"], "--drive '7' is 7 bytes/s, which no link or drive has: give a unit, such as 7GB/s"),
    ([*PLAN, "--drive", "fast"], "--drive 'fast' is not a size"),
    ([*PLAN, "--host-memory", "12 gigs"], "--host-memory '12 gigs' is not a size"),
    ([*PLAN, "--chunk-bytes", "1000"], "--chunk-bytes 1000 must be a multiple of 256"),
    ([*PLAN, "--min-bytes", "-1"], "--min-bytes '-1' is not a size"),
    ([*PLAN, "--hardware", "nope.json"], "The hardware profile nope.json cannot be read: No such file"),
    ([*PLAN, "--hardware", "/tmp"], "The hardware profile /tmp cannot be read: Is a directory"),
    ([*PLAN, "--batch", "0"], "batch must be a whole number of at least 1, not 0"),
    ([*PLAN, "--curve", "x.foo"], "x.foo has an unknown file type: use one of .png, .svg"),
    ([*PLAN, "--curve", "/nowhere/x.png"], "cannot be written to /nowhere/x.png"),
    (["simulate", "flux.1-dev", "--policy", "layerwise-prefix"], "keeps what fits a budget: give --memory"),
    (["timeline", "flux.1-dev", "--out", "picture"], "picture has an unknown file type: use one of .png, .svg, .json"),
    (["dump", "flux.1-dev", "--out", str(HERE / "conftest.py")], "conftest.py cannot be written: File exists"),
    (["pipeline", "flux.1-dev", "--picture", "x.foo"], "x.foo has an unknown file type: use one of .png, .svg"),
    (["pipeline", "flux.1-dev", "--hardware", "./hw"], "The hardware profile hw cannot be read: No such file"),
    (["pipeline", "flux.1-dev", "--memory", "-5"], "--memory '-5' is not a size"),
    (["bench", "contention", "--picture", "x.foo"], "x.foo has an unknown file type"),
    (["calibrate", "--emulate", "5"], "--emulate '5' is 5 bytes/s"),
    (["calibrate", "--device", "cpu", "--one-port", "port"], "--one-port is of an emulated link: give --emulate too"),
    (["calibrate", "--device", "cpu", "--ranks", "17"], "--ranks must be from 1 to 16, one for each device, not 17"),
    (["doctor", "--ranks", "0"], "--ranks must be at least 1"),
]


def test_what_can_be_checked_before_tracing_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def traced(*_: Any) -> None:
        raise AssertionError("it is traced")

    monkeypatch.setattr(planning_arguments, "_trace", traced)
    monkeypatch.setattr(pipeline, "_components", traced)
    for arguments, sentence in BEFORE_TRACING:
        assert main(arguments) == 2, arguments
        assert sentence in (said := capsys.readouterr().err) and said.count("\n") == 1, said
    assert main(PLAN) == 2 and "it is traced" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["diffusers", "transformers"])
def test_what_is_not_installed(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command that needs it says so in a sentence, before it starts ranks; the others do without."""
    monkeypatch.setitem(sys.modules, missing, None)
    commands = [["pipeline", "flux.1-dev"]]
    if missing == "diffusers":
        commands += [PLAN, ["why", "flux.1-dev", "x"], ["simulate", "flux.1-dev"], ["doctor", "flux.1-dev"]]
        commands += [["demo"], ["bench", "contention"], ["timeline", "flux.1-dev", "--out", "x.json"]]
    for arguments in commands:
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert f"needs {missing}, which is not installed: {install_line('diffusers')}." in said, said
        assert [line for line in said.splitlines() if not line.startswith("note: planned for ")] == [
            said.splitlines()[-1]
        ]
    assert main(["plan", MODEL, *SIZES]) == 0, "a model of its own needs none"


def test_pictures_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for arguments in ([*PLAN, "--curve", "x.png"], ["timeline", MODEL, "--out", "x.svg"]):
        assert main(arguments) == 2
        assert "A picture needs matplotlib, which is not installed: pip install" in capsys.readouterr().err
    assert not Path("x.png").exists() and not Path("x.svg").exists()


def test_an_error_of_a_rank_is_a_sentence_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    errors: list[Exception] = [ChunkflowError("memory=1 B is too little."), ValueError("memory=1 B is too little.")]

    def spawn(*_: Any, **__: Any) -> None:
        """As torch's, of a rank that raises."""
        try:
            raise errors.pop(0)
        except (ChunkflowError, ValueError):
            text = f"\n\n-- Process 0 terminated with the following error:\n{traceback.format_exc()}"
            raise ProcessRaisedException(text, 0, 1) from None

    monkeypatch.setattr(ranks, "spawn", spawn)
    bench = ["bench", "contention", "--lowering", "eager"]
    assert main(bench) == 2 and capsys.readouterr().err == "chunkflow: memory=1 B is too little.\n"
    assert main(bench) == 2 and "Traceback" in capsys.readouterr().err, "of a fault of ours"


def test_a_command_line_that_is_printed_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It calls the program as it was called."""
    script = tmp_path / "bin" / "chunkflow"
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable}\nfrom chunkflow_compile.cli.main import main\nmain()\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for argv in (str(script), "somewhere/main.py"):
        monkeypatch.setattr(sys, "argv", [argv])
        line = called("explain", "--help", "a folder")
        assert shlex.split(line)[-1] == "a folder"
        done = subprocess.run(shlex.split(line)[:-1], capture_output=True, text=True, check=True)
        assert "usage: chunkflow explain" in done.stdout
    monkeypatch.setattr(sys, "argv", [str(script)])
    assert called("explain") == f"{script} explain"
    monkeypatch.setenv("PATH", str(script.parent))
    assert called("explain") == "chunkflow explain"
