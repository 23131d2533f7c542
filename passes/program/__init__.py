"""Program: builds a Program from a Cut and a Plan, and proves it safe.

Start with rewrite (builds the program), which uses lifetimes.  Then read happens_before (the order of its ops), memory, and
verify (the proof) with collectives.  contracts checks the earlier stages.
"""
