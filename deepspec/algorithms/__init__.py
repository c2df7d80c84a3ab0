"""Draft algorithms: one file each, found by name."""
