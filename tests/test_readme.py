"""What the README prints runs."""

import re
from pathlib import Path

import numpy as np
from PIL import Image

from jaxonnx import demo
from jaxonnx.cli import main

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_python_examples(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"<!-- example -->\n```python\n(.*?)```", README, re.DOTALL)
    assert len(examples) == 4
    names = {}
    for example in examples:
        exec(compile(example, "README.md", "exec"), names)
    assert names["result"].history.epochs[-1]["validation_accuracy"] > 0.9
    assert {"trained.onnx", "sparse.onnx"} <= {path.name for path in tmp_path.iterdir()}


def test_command_line_examples(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    demo.model().save("net.onnx")
    (x, y), _ = demo.digits()
    np.savez("inputs.npz", x=x[:4])
    np.savez("data.npz", x=x[:256], y=y[:256])
    pixels = (x[:256, 0] * 255).astype(np.uint8)
    np.savez("images.npz", x=pixels, y=y[:256])
    Image.fromarray(pixels[0]).save("picture.png")
    section = README.split("## Command line")[1].split("\n## ")[0]
    commands = re.findall(r"^jaxonnx (.*)$", section, re.MULTILINE)
    assert commands
    for command in commands:
        assert main(command.split()) == 0, command
