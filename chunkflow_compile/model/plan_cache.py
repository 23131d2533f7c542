"""Plans on disk, by a digest of all that they were made from: a second process does not search for them again.

They lie in the folder of Inductor's cache, beside the lowered regions, and go with it.  Only the search is saved: a plan
from here is rewritten and verified as a new one is, so a file that is wrong costs time or is refused, and nothing worse.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch._inductor.config
from torch._inductor.runtime.cache_dir_utils import cache_dir

from chunkflow_compile.hardware.caches import check_compile_cache, warn_of_plans
from chunkflow_compile.passes import errors
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.plan import Plan

_log = logging.getLogger(__name__)

FOLDER = "chunkflow_plans"
# A plan of 60 blocks takes half a MiB, and each size and budget of a model has one.
MOST_PLANS = 256


@dataclass(frozen=True)
class DiskPlans:
    """The plans in a folder.  ``used``: the keys of those found or kept by this process, oldest first."""

    folder: Path
    used: dict[str, None] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def here() -> DiskPlans | None:
        """The plans beside Inductor's cache; None if its caches are switched off or cannot be used."""
        if torch._inductor.config.force_disable_caches or not check_compile_cache(needed=False):
            return None
        return DiskPlans(Path(cache_dir(), FOLDER))

    def find(self, key: str, check: Callable[[Plan], object]) -> Plan | None:
        """The plan of a key, None if there is none, or it cannot be read, or ``check`` raises ChunkflowError."""
        path = self._path(key)
        try:
            plan = Plan.from_json(path.read_text())
            check(plan)
        except FileNotFoundError:
            return None
        except OSError as error:
            warn_of_plans(self.folder, error)
            return None
        except (UnicodeDecodeError, RecursionError, ChunkflowError, TypeError, KeyError) as error:
            _log.warning("the plan in %s is ignored and made again: %s", path, error)
            return None
        self.used[key] = None
        return plan

    def keep(self, key: str, plan: Plan) -> None:
        """Write a plan, so that a reader never sees half of it.  Warn if the folder cannot be written."""
        self.put(key, plan.to_json())
        self.used[key] = None

    def put(self, key: str, text: str) -> None:
        path = self._path(key)
        part = path.with_suffix(f".{os.getpid()}_{threading.get_ident()}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                part.write_text(text)
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
        except OSError as error:
            warn_of_plans(self.folder, error)
            return
        with contextlib.suppress(OSError):  # another process drops them too
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Keep the newest plans only."""
        found = [*self.folder.glob("*.json")]
        for path in sorted(found, key=lambda p: p.stat().st_mtime_ns)[:-MOST_PLANS]:
            path.unlink()

    def texts(self) -> dict[str, str]:
        """The plans that this process found or kept, by key, as far as they are still there."""
        found = dict[str, str]()
        for key in self.used:
            with contextlib.suppress(OSError):
                found[key] = self._path(key).read_text()
        return found

    def _path(self, key: str) -> Path:
        """The file of a key.  Another version of the planner, which may decide otherwise, has other files."""
        return self.folder / f"{hashlib.sha256(f'{key} {_planner()}'.encode()).hexdigest()[:32]}.json"


@cache
def _planner() -> str:
    """Digest of the code that makes plans."""
    found = hashlib.sha256()
    for path in sorted(Path(errors.__file__).parent.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()
