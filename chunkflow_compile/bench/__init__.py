"""Measuring policies side by side: real ranks, real compiled regions, real copies, on an emulated link."""
