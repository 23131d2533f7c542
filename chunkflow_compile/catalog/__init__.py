"""Diffusion transformers from diffusers, by name and sizes, as models with inputs or as traced graphs.

Read sizes.py and families.py (how each class is built and called) first, then small.py (small random models), ulysses.py
(sequence parallelism) and branches.py (CFG parallelism). weightless.py traces a model without weights. presets.py traces
models at their published sizes, with the configurations in configs.py. published.py adds their encoders and VAEs.
"""
