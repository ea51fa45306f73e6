"""Write reference.md."""

from pathlib import Path

from jaxonnx.docs import reference

(Path(__file__).parent / "reference.md").write_text(reference(), "utf-8")
