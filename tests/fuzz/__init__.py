"""Fuzzing of everything that reads a file of others: `python tests/fuzz` (see run.py). Needs the run-time dependencies only."""
