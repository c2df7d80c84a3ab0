"""Formats of others: what they call things, how their drafts are read, how ours are written for engines."""
