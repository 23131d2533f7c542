"""A diffusers pipeline within one budget of device memory.

api.py has the public functions.  Read apply.py, then budget.py and phase.py: each component is a phase.  intercept.py sees
its calls, and oom_retry.py runs one again that found no memory.  explain.py says what a model or a pipeline did.
"""
