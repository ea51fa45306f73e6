"""Compile programs for devices that need not be there: `python -m benchmarks.compiled`."""

from benchmarks.compiled.programs import main

main()
