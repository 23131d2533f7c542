"""Program: builds a Program from a Cut and a Plan, and proves the program safe.

Start with rewrite, which builds the program, and with lifetimes, which determines when values are dropped.  Then read
happens_before (the order of ops), memory, and verify (the proof), which uses collectives, reads, borders, repeats and
fidelity.  The module contracts checks the results of the earlier stages.
"""
