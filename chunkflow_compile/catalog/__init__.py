"""Diffusion transformers from diffusers: a name and sizes come in; a model, its inputs or a traced graph goes out.

Read sizes.py and families.py (how each class is made and called) first, then small.py (small random models), ulysses.py
(sequence parallelism) and branches.py (CFG parallelism).  weightless.py traces a model without weights; presets.py does
so at published sizes, which configs.py lists, and published.py has the encoders and VAEs around them.
"""
