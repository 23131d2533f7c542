"""Plug-ins of inference servers: each streams the weights of a server's diffusion transformer.

A server finds its plug-in by an entry point, and calls the plug-in in each process of the server.  settings.py reads the
user's settings from the environment; without settings, a plug-in does nothing.
"""
