"""What runs a program: host store, device arena, streams and events, executor, measurement."""
