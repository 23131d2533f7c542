"""One placed model: ``offload`` moves its weights, a ``Placement`` holds what runs on them, ``restore`` undoes it.

Read placement.py, then offload.py; replan.py changes the plan of a running model.
"""
