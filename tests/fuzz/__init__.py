"""A fuzzer of its own: mutated files of every format, and what may happen to them.

`python -m tests.fuzz --minutes 60` reports what it finds, `tests/fuzz/found.py` keeps it.
"""
