"""One placed model: ``offload`` moves its weights, a ``Placement`` holds what runs on them, ``bring_back`` undoes it.

Read placement.py, then offload.py; replan.py changes the plan of a running model.
"""
