"""The parts of the server on Ray Serve that need no Ray: settings, requests, and the files of their results."""

from __future__ import annotations

import io
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_pipelines import small_pipeline

if not all(map(find_spec, ("pydantic", "diffusers", "transformers"))):
    pytest.skip("pydantic or diffusers is not installed", allow_module_level=True)

from PIL import Image
from pydantic import ValidationError
from serving import Request, generate, parse, warm_up

SMALL: dict[str, Any] = {"prompt": "a paper boat", "height": 32, "width": 32, "steps": 3}
GIVEN = {"CHUNKFLOW_MEMORY": "12GiB", "CHUNKFLOW_OPTIONS": '{"pack": "auto"}'}


@pytest.mark.parametrize(
    ("flags", "environ", "memory", "options"),
    [
        ((), {}, None, {}),
        ((), GIVEN, "12GiB", {"pack": "auto"}),
        (("--memory", "8GiB"), GIVEN, "8GiB", {"pack": "auto"}),
        (("--options", '{"lowering": "eager"}'), GIVEN, "12GiB", {"lowering": "eager"}),
        ((), {"CHUNKFLOW_OPTIONS": '{"peers": "auto"}'}, None, {"peers": "auto"}),
        (("--tiny",), {}, "1MiB", {"min_bytes": 2048, "lowering": "eager"}),
        (("--tiny", "--options", '{"min_bytes": 4096}'), {}, "1MiB", {"min_bytes": 4096, "lowering": "eager"}),
    ],
)
def test_flags_override_the_environment(
    flags: tuple[str, ...], environ: dict[str, str], memory: str | None, options: dict[str, Any]
) -> None:
    found = parse("", ["flux", *flags], environ)
    assert (found.memory, found.options) == (memory, options)


@pytest.mark.parametrize(
    ("flags", "environ", "said"),
    [
        ((), {"CHUNKFLOW_MEMORY": "much"}, "CHUNKFLOW_MEMORY='much' is not a size"),
        ((), {"CHUNKFLOW_OPTIONS": '{"lowerin": "eager"}'}, "CHUNKFLOW_OPTIONS: Unknown option 'lowerin'"),
        (("--options", "eager"), {}, "CHUNKFLOW_OPTIONS is not JSON"),
        (("--warm-up", "1024"), {}, "'1024' is not a size: give HEIGHTxWIDTH"),
        (("--warm-up", "33x32"), {}, "'33x32': height: Input should be a multiple of 16"),
        (("--adapter", "ink"), {}, "'ink' is not NAME=PATH"),
    ],
)
def test_invalid_settings_end_the_server_with_a_sentence(
    flags: tuple[str, ...], environ: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse("", ["flux", *flags], environ)
    assert said in capsys.readouterr().err


def test_the_warm_up_generates_each_size_twice_with_each_adapter() -> None:
    found = parse("", ["wan", "--warm-up", "32x64x5", "--warm-up", "16x16", "--adapter", "ink=a=b"], {})
    assert found.adapter == {"ink": "a=b"}
    sizes = [(r.height, r.width, r.num_frames, r.adapter) for r in warm_up(found)]
    large, small = (32, 64, 5), (16, 16, None)
    assert sizes == [(*size, adapter) for size in (large, small) for adapter in (None, None, "ink", "ink")]
    assert not warm_up(parse("", ["wan", "--adapter", "ink=a"], {}))


@pytest.mark.parametrize(
    "wrong",
    [{"guidance_scale": -1}, {"guidance_scale": float("nan")}, {"format": "gif"}, {"fps": 0}, {"negative": "blur"}],
    ids=str,
)
def test_invalid_requests_raise_an_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Request(**{**SMALL, **wrong})


def pixels(file: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(file)))


@pytest.mark.parametrize(
    ("name", "guided"),
    [
        ("flux", {"guidance_scale": 7.5}),
        ("flux", {"negative_prompt": "blurred", "true_cfg_scale": 4.0}),
        ("wan", {"num_frames": 5, "negative_prompt": "blurred", "guidance_scale": 4.0}),
    ],
)
def test_guidance_reaches_the_pipeline(name: str, guided: dict[str, Any]) -> None:
    pipe = small_pipeline(name)
    request = Request(**SMALL, **guided, seed=3)
    assert request.sizes() == {"height": 32, "width": 32, "num_inference_steps": 3, **guided}
    files = generate(pipe, request)
    call = {**{n: v for n, v in SMALL.items() if n != "steps"}, **guided, "num_inference_steps": 3}
    want = pipe(**call, generator=torch.Generator().manual_seed(3), output_type="pil")[0]
    frames = want[0] if isinstance(want[0], list) else want
    assert len(files) == len(frames) == guided.get("num_frames", 1)
    assert all(np.array_equal(pixels(file), np.asarray(frame)) for file, frame in zip(files, frames, strict=True))
    changed = generate(pipe, Request(**{**SMALL, **guided, "seed": 3, list(guided)[-1]: 1.5}))
    assert any(not np.array_equal(pixels(file), np.asarray(f)) for file, f in zip(changed, frames, strict=True))


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("flux", {"format": "mp4"}, "FluxPipeline generates images, and mp4 is for videos"),
        ("flux", {"num_frames": 5}, "FluxPipeline has no argument num_frames: leave it out."),
        ("wan", {"format": "png", "num_frames": 5}, "WanPipeline generates videos, and png is for one image"),
        ("wan", {"format": "mp4", "num_frames": 5}, "cannot write mp4 files: install imageio and imageio-ffmpeg"),
    ],
)
def test_what_a_pipeline_does_not_support_raises_an_error_before_it_generates(
    name: str, given: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = small_pipeline(name)
    monkeypatch.setattr(pipe, "transformer", None)
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(ValueError, match=said):
        generate(pipe, Request(**SMALL, **given))


def test_a_video_is_an_mp4_file(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    imageio = pytest.importorskip("imageio")
    (file,) = generate(small_pipeline("wan"), Request(**SMALL, num_frames=5, format="mp4", fps=8))
    assert file[4:8] == b"ftyp"
    (tmp_path / "video.mp4").write_bytes(file)
    with imageio.get_reader(tmp_path / "video.mp4") as video:
        assert video.get_meta_data()["fps"] == 8
        assert [frame.shape for frame in video] == [(32, 32, 3)] * 5
