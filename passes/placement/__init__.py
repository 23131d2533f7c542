"""Placement.  Input: a Problem, a Hardware and a goal.  Output: a Plan.

Read timeline, which plays the step (passes/step.py) of a placement; windows, residency, policies and search, which find one;
slots, reasons and place, which turn it into a Plan; then curve, which plans for every memory size.
"""
