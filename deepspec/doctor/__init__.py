"""`deepspec doctor`: what this machine can do, and what would stop a run before it starts."""
