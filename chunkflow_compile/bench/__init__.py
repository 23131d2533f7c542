"""Measurement of policies side by side: a Job comes in; its arms are run on real ranks; a BenchRecord goes out.

Read regimes.py (what is measured), arms.py (the names of the policies) and job.py (what a rank is given and returns)
first; then turns.py (one rank's part) with subject.py, link_load.py and link_error.py; ranks.py starts the processes,
summary.py makes record and table, peers.py has what people use today.
"""
