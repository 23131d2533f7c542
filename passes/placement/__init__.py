"""Placement: makes a Plan from a Problem, a Hardware and a goal.

Start with timeline, which simulates the step (passes/step.py) of a placement.  The modules windows, residency, policies
and search find a placement; slots, reasons and place turn it into a Plan; curve plans for every memory size.
"""
