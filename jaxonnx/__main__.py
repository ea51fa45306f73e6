"""`python -m jaxonnx` is the command `jaxonnx`."""

from jaxonnx.cli import main

raise SystemExit(main())
