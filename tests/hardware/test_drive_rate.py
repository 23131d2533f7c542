"""The rate of a drive, measured on a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from chunkflow_compile.hardware.drive_rate import drive_rate
from chunkflow_compile.passes.errors import ChunkflowError


def test_the_largest_file_of_a_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"x" * 100)
    (tmp_path / "large").write_bytes(bytes(64 << 20))
    assert 1e5 < drive_rate(tmp_path) < 1e12
    assert 1e5 < drive_rate(tmp_path / "large") < 1e12


def test_what_cannot_be_measured(tmp_path: Path) -> None:
    with pytest.raises(ChunkflowError, match="has no files: give the folder of a checkpoint"):
        drive_rate(tmp_path)
    (tmp_path / "small").write_bytes(b"x" * 100)
    with pytest.raises(ChunkflowError, match="has 100 B, too little to measure a drive"):
        drive_rate(tmp_path)
    with pytest.raises(ChunkflowError, match="No such file or directory"):
        drive_rate(tmp_path / "none")
