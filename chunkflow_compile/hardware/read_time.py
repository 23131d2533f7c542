"""How long it takes to read weights from their checkpoint, before a model can start."""

from __future__ import annotations

from dataclasses import dataclass

from chunkflow_compile.passes.errors import ChunkflowError

from .profiles import CPU, MEASURED, load_profile

# Less is not worth a word.
_LEAST_S = 1.0


@dataclass(frozen=True)
class ReadTime:
    """``nbytes`` of files, read once for all ranks of a machine, from a drive of ``rate`` bytes/s."""

    nbytes: int
    rate: float

    @staticmethod
    def here(nbytes: int) -> ReadTime:
        """With the rate that ``chunkflow calibrate`` has measured on this machine, or else that of a common drive."""
        try:
            profile = load_profile(MEASURED)
        except ChunkflowError:  # not measured, or the file is damaged, which is no reason not to read
            profile = load_profile(CPU)
        return ReadTime(nbytes, profile.drive_bandwidth)

    @property
    def seconds(self) -> float:
        """The prediction.  What is in the page cache already takes less."""
        return self.nbytes / self.rate

    @property
    def text(self) -> str:
        """The prediction in words, empty if that is no time to wait for."""
        return str(self) if self.seconds >= _LEAST_S else ""

    def __str__(self) -> str:
        return f"from a drive of {self.rate / 1e9:.1f} GB/s in {self.seconds:.0f} s"
