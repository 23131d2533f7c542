"""Policies measured side by side on real ranks: a Job comes in, a BenchRecord goes out.

Read regimes.py (the configurations), arms.py (the policies by name) and job.py (the input and the result of a rank)
first.  Then read turns.py (one rank's part), which uses subject.py and link.py.  ranks.py starts the processes,
summary.py computes the record and the table, alternatives.py holds the alternatives to ChunkFlow.
"""
