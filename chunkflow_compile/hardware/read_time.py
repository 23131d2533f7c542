"""The time to read weights from their checkpoint before a model can start."""

from __future__ import annotations

from dataclasses import dataclass

from chunkflow_compile.passes.errors import ChunkflowError

from .profiles import CPU, MEASURED, load_profile

# The minimum predicted time, in seconds, that is reported.
_LEAST_S = 1.0


@dataclass(frozen=True)
class ReadTime:
    """The predicted time to read ``nbytes`` bytes of files from an SSD that delivers ``rate`` bytes/s.  The files are
    read once for all ranks of a machine."""

    nbytes: int
    rate: float

    @staticmethod
    def here(nbytes: int) -> ReadTime:
        """Predict the time with the SSD rate that ``chunkflow calibrate`` has measured on this machine, or else with
        the rate of a typical SSD."""
        try:
            profile = load_profile(MEASURED)
        except ChunkflowError:  # the profile is missing or damaged, but the model can be loaded without it
            profile = load_profile(CPU)
        return ReadTime(nbytes, profile.drive_bandwidth)

    @property
    def seconds(self) -> float:
        """The predicted time.  Files that are already in the page cache are read in less time."""
        return self.nbytes / self.rate

    @property
    def text(self) -> str:
        """The prediction in words; empty if the time is too short to matter."""
        return str(self) if self.seconds >= _LEAST_S else ""

    def __str__(self) -> str:
        return f"from a drive of {self.rate / 1e9:.1f} GB/s in {self.seconds:.0f} s"
