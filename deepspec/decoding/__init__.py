"""Decoding: sampling, lossless verification, schedules and the speculative loop; knows no single algorithm."""
