"""Reports for people: plans, stages, measurements and machines as text, JSON, pictures or traces.

Start with record.py, which contains records and the text form of sizes and times.  Listings: lines.py, annotate.py,
listings.py, stages.py, logs.py.  Plans: plan_tables.py, story.py.  Predicted steps: lanes.py, perfetto.py, pictures.py,
timeline_picture.py.  Measurements: comparison.py, explanation.py, pictures.py.  Machines: health.py.
"""
