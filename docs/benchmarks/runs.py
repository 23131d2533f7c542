"""Functions that several benchmarks share: run a process with its own caches, time a call, read saved figures, and write
a page."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chunkflow_compile.passes.errors import ChunkflowError


def in_a_process(script: str, arguments: Iterable[str], cache: str) -> Any:
    """Run a script in a separate process whose compile caches are in a folder; return its last line, parsed as JSON."""
    # set TMPDIR, too, because Inductor's precompiled header is always in the folder for temporary files
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "TMPDIR": cache}
    command = [sys.executable, script, *arguments]
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def timed(run: Callable[..., Any], inputs: Mapping[str, Any]) -> float:
    """Return the seconds of a call."""
    begin = time.perf_counter()
    run(**inputs)
    return time.perf_counter() - begin


def saved(path: Path, command: str) -> Any:
    """Return the content of a file of figures, parsed as JSON.  ``command``: the command that writes the file.

    Raises ChunkflowError if the file cannot be read or is not JSON.
    """
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise ChunkflowError(f"{path} cannot be read ({error.strerror}): {command} writes it.") from error
    except ValueError as error:
        raise ChunkflowError(f"{path} is not valid JSON ({error}): {command} writes it again.") from error


@contextmanager
def errors_in_a_sentence() -> Iterator[None]:
    """If a ChunkflowError is raised in the context, exit with its message instead of a traceback."""
    try:
        yield
    except ChunkflowError as error:
        sys.exit(str(error))


def replaced(page: str, text: str, part: str, begin: str, end: str, body: str) -> str:
    """Return the text of a page with the lines between ``begin`` and ``end`` replaced by ``body``.

    ``page``: the name of the page.  ``part``: the name of the part that is replaced.  Raises ChunkflowError if the page lacks
    one of the two lines.
    """
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ChunkflowError(f"{page} has no place for the {part}: add the lines {begin.strip()} and {end.strip()}.")
    return f"{before}{begin}{body}\n{end}{after}"


def put_section(page: Path, title: str, heading: str, text: str) -> None:
    """Write one section of a page, and keep the sections that other runs or scripts have written.

    ``title``: the title of the page, if it does not exist yet.
    """
    found = page.read_text() if page.exists() else f"# {title}\n"
    head, *sections = re.split(r"\n(?=## )", found)
    kept = {section.partition("\n")[0]: section.strip() for section in sections}
    kept[f"## {heading}"] = f"## {heading}\n\n{text.strip()}"
    page.write_text("\n\n".join([head.strip(), *kept.values()]) + "\n")
