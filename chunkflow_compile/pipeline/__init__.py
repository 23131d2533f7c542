"""Runs a diffusers pipeline within one budget of device memory.

api.py contains the public functions.  Read apply.py first, then budget.py and phase.py.  A *phase* is a component of a
pipeline, together with the plans and measurements of its calls.  phase_compilation.py compiles a component.  shortages.py
contains the errors for a budget that is too small.  intercept.py intercepts the calls of the pipeline.  oom_retry.py decides
whether a call that ran out of memory may be retried.  explain.py reports how a model or a pipeline ran.
"""
