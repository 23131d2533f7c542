"""Diffusion transformers from their diffusers classes: small random ones, and how to run them Ulysses-parallel."""
