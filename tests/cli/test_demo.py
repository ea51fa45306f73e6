"""The main job in one command: `jaxonnx demo`."""

import io

import onnx
import pytest
from rich.console import Console

from jaxonnx import demo


@pytest.mark.deep
def test_demo(tmp_path):
    text = io.StringIO()
    dense, sparse = demo.run(tmp_path / "new", epochs=5, console=Console(file=text, width=120))
    assert min(dense.jaxonnx, dense.onnxruntime) >= 0.975
    assert abs(dense.jaxonnx - dense.onnxruntime) < 0.003
    assert abs(sparse.jaxonnx - sparse.onnxruntime) < 0.003
    assert dense.jaxonnx - sparse.jaxonnx < 0.02
    assert sparse.verified == 3
    assert sparse.bytes_packed < 0.6 * sparse.bytes_dense
    for name in ("dense.onnx", "sparse.onnx"):
        onnx.checker.check_model(tmp_path / "new" / name, full_check=True)
    assert (tmp_path / "new" / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "3 of 3 weights" in text.getvalue()


def test_a_folder_that_cannot_be_written_is_found_before_training():
    with pytest.raises(OSError, match="/dev/null/out"):
        demo.run("/dev/null/out")
