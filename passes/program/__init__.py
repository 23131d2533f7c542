"""Program.  Input: a Cut and a Plan.  Output: a Program, proved safe.

Read rewrite (builds it) with lifetimes, happens_before (orders its ops) and memory, verify (proves it)
with collectives; then contracts, which checks the stages before it.
"""
