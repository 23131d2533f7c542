"""Measurements that compare policies on real ranks: ``run_job`` runs a Job, and ``summarise`` returns a BenchRecord.

Start with regimes.py (the configurations), arms.py (the policies by name) and job.py (the input and the result of a rank).
Then read turns.py (the work of one rank), which uses resident_steps.py and running_arm.py.  ranks.py starts the processes,
bench_record.py computes the record and the table, and alternatives.py contains the alternatives to ChunkFlow.
"""
