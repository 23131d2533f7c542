"""Program.  Input: a Cut and a Plan.  Output: a Program, proved safe.

Read rewrite (builds it), happens_before (orders its ops), verify (proves it); then contracts, which checks the stages
before it.
"""
