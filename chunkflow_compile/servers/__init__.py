"""Plug-ins of inference servers: each streams the weights of a server's diffusion transformer.

A server finds its plug-in by an entry point and calls it in each of its processes.  settings.py reads what the user has set
in the environment; without that, a plug-in does nothing.
"""
