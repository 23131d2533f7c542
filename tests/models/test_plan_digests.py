"""The plans of all presets are those of ``plan_digests.json``, byte for byte."""

from __future__ import annotations

import json

import pytest
from plan_digests import CASES, FILE, Case, digests

# Of the smallest model; the others take from half a minute to several.
QUICK = Case("wan2.1-t2v-1.3b")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c == QUICK else pytest.mark.long) for c in CASES], ids=str
)
def test_the_plans_of_a_preset_are_as_they_were(case: Case) -> None:
    assert digests(case) == json.loads(FILE.read_text())[str(case)]
