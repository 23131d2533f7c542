"""Measures policies next to each other on real ranks: takes a Job and returns a BenchRecord.

Start with regimes.py (the configurations), arms.py (the policies by name) and job.py (the input and the result of a rank).
Then read turns.py (the work of one rank), which uses subject.py and link.py.  ranks.py starts the processes, summary.py
computes the record and the table, and alternatives.py contains the alternatives to ChunkFlow.
"""
