"""A model that a command plans: its trace, its cut, its problem, and plans for the command's goal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from chunkflow_compile.catalog.trace_cache import CacheEntry
from chunkflow_compile.passes.cutting import choose_cut, groups_for
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.graph.pack import packable, packed
from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.graph.shard import on_peers
from chunkflow_compile.passes.graph.traced import Traced
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.hoisting import Hoisting, HoistingFigures, hoisting_of
from chunkflow_compile.passes.placement.exchanging import GroupChoice
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.planning import Settings, make_plan
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.report.plan_tables import hoisting_sentence
from chunkflow_compile.report.record import prose
from chunkflow_compile.weights.drive import for_the_drive, with_drive


class Problems(NamedTuple):
    """The problems of a model.  ``problem``: the problem of the graph that runs in every step.  ``raw``: the problem of
    the whole model, without packed or sharded weights and without hoisting.  ``hoisted``: the figures of hoisting, or
    None.  ``why_groups``: the reason for the number of groups of heads; empty if the user has given this number."""

    problem: Problem
    raw: Problem
    hoisted: HoistingFigures | None
    why_groups: str = ""


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A model and the machine for which it is planned.  ``forwards``: the number of calls of the model per denoising step
    and rank.

    ``trace``: a function that traces the model, or reads an earlier trace from the cache.  ``key``: everything that the
    trace depends on, or None if this is unknown, as for a user's own model.  ``cfg_parallel``: 2 if each branch of
    classifier-free guidance runs on separate ranks, otherwise 1.  ``regional``: whether blocks are compiled separately
    and run as a cycle.  ``host_memory``: the maximum bytes of weights in host memory, or None.
    """

    title: str
    trace: Callable[[], Traced]
    key: Mapping[str, Any] | None = None
    degree: int
    forwards: int
    settings: Settings
    cfg_parallel: int = 1
    regional: bool = False
    host_memory: int | None = None

    @cached_property
    def traced(self) -> Traced:
        return self.trace()

    @cached_property
    def cut(self) -> Cut:
        """The cut to plan.  Cutting takes a second for 10,000 nodes, and longer if it has to choose the weights to pack
        or to shard.  Raises ChunkflowError if weights must be packed and no weight can be packed, or if they must be
        sharded and no weight can be sharded."""
        hoisting = self.hoisting
        cut = (
            choose_cut(self.traced, self.settings_of_cut)
            if hoisting is None
            else choose_cut(hoisting.halves.main, hoisting.main)
        )
        if self.settings.goal.pack and not packable(cut.raw or cut):
            raise ChunkflowError(
                f"--pack packs contiguous weights of bfloat16, each read by one region, and {self.title} has none: leave it "
                "out, or give a model in bfloat16."
            )
        return cut

    @cached_property
    def hoisting(self) -> Hoisting | None:
        """The two halves of the model, or None if nothing is hoisted.  Raises ChunkflowError if products must be hoisted
        and no product can be hoisted."""
        return hoisting_of(self.traced, self.settings_of_cut)

    @cached_property
    def _groups(self) -> GroupChoice | None:
        """The chosen number of groups of heads and the reason for it, or None if the user has given the number."""
        return groups_for(self.traced, self.settings) if self.settings.goal.exchange_groups == "auto" else None

    @property
    def settings_of_cut(self) -> Settings:
        """The settings with the chosen number of groups of heads."""
        if self._groups is None:
            return self.settings
        groups = self._groups.groups
        goal = replace(self.settings.goal, exchange_groups=groups > 1 and groups)
        return replace(self.settings, goal=goal)

    @property
    def _entry(self) -> CacheEntry[Problems] | None:
        """The cache entry for the problems of the cut."""
        if self.key is None:
            return None
        key = {"traced": self.key, "settings": asdict(self.settings)}
        return CacheEntry(kind="problem", key=key, write=_bodies, read=_problems)

    @cached_property
    def kept(self) -> Problems | None:
        """The cached problems, or None.  If there are cached problems, the model need not be traced or cut."""
        return None if self._entry is None else self._entry.find()

    @cached_property
    def _found(self) -> Problems:
        if self.kept is not None:
            return self.kept
        goal, problem = self.settings.goal, self.cut.problem
        raw = on_peers(packed(self.cut, ()), (), 0).problem if goal.pack or goal.peers else problem
        if (hoisting := self.hoisting) is not None:
            plain = replace(goal, pack=False, peers=False, hoist=False)
            plain = replace(plain, exchange_groups=self.settings_of_cut.goal.exchange_groups)
            raw = choose_cut(self.traced, replace(self.settings, goal=plain)).problem
        why = "" if self._groups is None else self._groups.why
        found = Problems(problem, raw, None if hoisting is None else hoisting.figures, why)
        if self._entry is not None:
            self._entry.keep(found)
        return found

    @cached_property
    def problem(self) -> Problem:
        return self._where_it_runs(self._found.problem)

    @cached_property
    def raw(self) -> Problem:
        """The problem of the whole model, without packed or sharded weights and without hoisting."""
        return self._where_it_runs(self._found.raw)

    @property
    def hoisted(self) -> HoistingFigures | None:
        """The figures of hoisting, or None if nothing is hoisted."""
        return self._found.hoisted

    @property
    def why_groups(self) -> str:
        """The reason for the number of groups of heads; empty if the user has given this number."""
        return self._found.why_groups

    def _where_it_runs(self, problem: Problem) -> Problem:
        """Return a problem that is divided into blocks with --regional, and that has weights on the SSD with
        --host-memory."""
        if self.regional:
            problem = problem.in_blocks
            if not problem.regions:
                raise ChunkflowError(
                    f"{self.title} has no blocks in a ModuleList to compile one by one: leave out --regional."
                )
        if self.host_memory is None:
            return problem
        stored = {w.name: w.nbytes for w in problem.weights if w.source.compressed}
        large = [(name, stored.get(name, nbytes)) for name, nbytes in self.traced.large]
        return with_drive(problem, for_the_drive(large, self.host_memory))

    @property
    def hardware(self) -> Hardware:
        return self.settings.hardware

    def plan(self, problem: Problem | None = None, **other: Any) -> Plan:
        """Return a plan for the command's goal.  ``problem``: the problem to plan, by default :attr:`problem`.
        ``other``: settings that replace the command's settings."""
        problem = problem or self.problem
        settings = self.settings_of_step if problem is self.problem else self.settings
        plan = make_plan(problem, replace(settings, **other), residents_in_arena=self.regional)
        return replace(plan, model=self.title)

    @property
    def settings_of_step(self) -> Settings:
        """The settings for planning the graph that runs in every step.  If products are hoisted, they count the memory of
        the rows and reserve memory for the preamble."""
        if self.hoisted is None:
            return self.settings
        return replace(self.settings, external_bytes=self.hoisted.external_bytes, arena=self.hoisted.arena)

    @property
    def ranks(self) -> int:
        return self.cfg_parallel * self.degree

    @property
    def where(self) -> str:
        """A phrase that names the machine and, with several ranks, how a step is split over them."""
        if self.ranks == 1:
            return f"on {self.hardware.name}"
        if self.cfg_parallel == 1:
            return f"Ulysses degree {self.degree} on {self.hardware.name}"
        return f"{self.ranks} ranks: CFG parallel {self.cfg_parallel} x Ulysses {self.degree} on {self.hardware.name}"

    @property
    def calls(self) -> str:
        """A phrase on how often a rank calls the model per step."""
        return f"{self.forwards} forward{'s' * (self.forwards != 1)} per step"

    @property
    def heading(self) -> str:
        without = f"; without {', '.join(sorted(self.settings.disabled))}" if self.settings.disabled else ""
        without += "; its blocks compiled one by one" if self.regional else ""
        return prose(f"{self.title}; {self.where}, {self.calls}{without}")

    def heading_of(self, preamble: bool) -> str:
        """Return the heading for output about one graph.  ``preamble``: whether this is the preamble; otherwise, it is
        the graph that runs in every step, which is main if products are hoisted."""
        if self.hoisted is None:
            return self.heading
        half = "the preamble" if preamble else "main"
        return prose(f"{self.heading}; {half}, hoisted: {hoisting_sentence(self.hoisted)}")


def _bodies(found: Problems) -> list[Any]:
    hoisted = None if found.hoisted is None else asdict(found.hoisted)
    return [hoisted, found.why_groups, *(problem.body for problem in dict.fromkeys((found.problem, found.raw)))]


def _problems(bodies: Sequence[Any]) -> Problems:
    problems = [Problem.from_body(body) for body in bodies[2:]]
    return Problems(
        problems[0], problems[-1], None if bodies[0] is None else HoistingFigures(**bodies[0]), str(bodies[1])
    )
