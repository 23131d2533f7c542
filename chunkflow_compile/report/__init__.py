"""Reports for people: a plan, a stage, a measurement or a machine comes in; text, JSON, pictures or a trace goes out.

Read record.py (units, records) first.  Listings: lines.py, annotate.py, listings.py, stages.py, logs.py.  Plans:
plan_tables.py, story.py.  Predicted steps: lanes.py, perfetto.py, pictures.py, timeline_picture.py.
Measurements: explain.py, pictures.py.  Machines: health.py.
"""
