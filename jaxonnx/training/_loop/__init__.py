"""The loop of a run: batches, rows of the history, reports, memory, and why a run ends early."""
