"""Diffusion transformers from diffusers: a name and sizes come in; a model, its inputs or a traced graph goes out.

Read families.py (how each class is configured and called) first, then small.py (small random models), ulysses.py
(sequence parallelism) and branches.py (CFG parallelism).  weightless.py traces a model without weights; presets.py does
so at published sizes.
"""
