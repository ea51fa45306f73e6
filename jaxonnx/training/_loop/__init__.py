"""The loop of a run: `run`, reports and the bar, the history, memory, and reasons to end early."""
