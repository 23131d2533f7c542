"""Places models: ``offload`` moves the weights of a model to host memory, a ``Placement`` keeps the programs that run on
these weights, and ``bring_back`` moves the weights back.

Read placement.py first, then offload.py.  replan.py changes the plan of a running model.
"""
