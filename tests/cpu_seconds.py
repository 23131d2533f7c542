"""A plugin of pytest that counts the CPU seconds of each test, including those of the processes that it starts.

``make durations`` runs the tests of ``make test`` with it and writes the table to ``tests/durations.txt``.  Unlike the
durations of pytest, the figures hardly depend on other work on the machine.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Tests that the table lists by name.
LISTED = 40
_TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """The CPU time of this process, of its descendants, and of those of their children that have ended."""
    children, seconds = defaultdict[int, list[int]](list), dict[int, float]()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # after the name of the program, which may contain spaces: state, parent, ..., utime, stime, cutime, cstime
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        children[int(fields[1])].append(int(entry.name))
        seconds[int(entry.name)] = sum(map(int, fields[11:15])) / _TICK
    found, total = [os.getpid()], 0.0
    while found:
        process = found.pop()
        total += seconds.get(process, 0.0)
        found += children[process]
    return total


class Seconds:
    """CPU seconds by test, of this process or, in the process that distributes the tests, of all its workers."""

    def __init__(self) -> None:
        self.tests = dict[str, float]()
        self.outside = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = cpu_seconds()
        found = yield
        self.tests[item.nodeid] = round(cpu_seconds() - before, 2)
        return found

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.outside += cpu_seconds() - sum(self.tests.values())
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["cpu_seconds"] = (self.tests, self.outside)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        tests, outside = node.workeroutput["cpu_seconds"]
        self.tests |= tests
        self.outside += outside

    def pytest_terminal_summary(self, config: pytest.Config) -> None:
        if not hasattr(config, "workeroutput"):
            Path(config.getoption("--cpu-seconds")).write_text(table(self.tests, self.outside))


def table(tests: dict[str, float], outside: float) -> str:
    """The seconds of each file, then those of the most expensive tests."""
    files, counts = Counter[str](), Counter[str]()
    for name, seconds in tests.items():
        file = name.partition("::")[0]
        files[file] += seconds  # type: ignore[assignment]
        counts[file] += 1
    lines = [
        f"CPU seconds of {len(tests)} tests, with the processes that they start: {sum(tests.values()):.0f}.",
        f"Imports, collection and the ends of processes: {max(0.0, outside):.0f}.",
        "",
        *(f"{seconds:7.1f}  {counts[file]:4} tests  {file}" for file, seconds in files.most_common()),
        "",
        *(f"{seconds:7.1f}  {name}" for name, seconds in Counter(tests).most_common(LISTED)),
    ]
    return "\n".join(lines) + "\n"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-seconds", default="tests/durations.txt", help="the file that the table is written to")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Seconds())
