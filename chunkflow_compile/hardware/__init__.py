"""Machines: profiles that are built in, and one's own, measured."""
