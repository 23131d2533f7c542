"""The plans of presets are those of ``plan_digests.json``, byte for byte."""

from __future__ import annotations

import json

import pytest
from plan_digests import CASES, FILE, Case, digests

KNOWN = json.loads(FILE.read_text())


@pytest.mark.long  # each traces a model of full size: a minute or more
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_plans_of_a_preset_are_as_they_were(case: Case) -> None:
    assert digests(case) == KNOWN[str(case)]
