"""What several benchmarks do: a process with caches of its own, and a timed call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def in_a_process(script: str, arguments: Iterable[str], cache: str) -> Any:
    """What a script prints last, as JSON, in a process of its own whose compile caches are in a folder."""
    # Inductor's precompiled header is in the folder for temporary files, whatever its cache folder.
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "TMPDIR": cache}
    command = [sys.executable, script, *arguments]
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def timed(run: Callable[..., Any], inputs: Mapping[str, Any]) -> float:
    """Seconds of a call."""
    begin = time.perf_counter()
    run(**inputs)
    return time.perf_counter() - begin
