"""A region's graph becomes something to call: through Inductor, or as it is."""
