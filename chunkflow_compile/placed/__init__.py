"""A placed model: ``offload`` moves its weights, a ``Placement`` holds the programs that run on them, ``bring_back`` undoes
it.

Read placement.py first, then offload.py.  replan.py changes the plan of a running model.
"""
