"""Places models.  ``offload`` moves the weights of a model to host memory, and ``bring_back`` moves them back.  A
``Placement`` keeps the programs that read these weights.

Read placement.py first, then offload.py.  replan.py changes the plan of a running model.
"""
