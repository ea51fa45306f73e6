"""Quantized files in onnxruntime-web, whose WebAssembly runs in node as in browsers."""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import jaxonnx
from jaxonnx import Quantization, demo
from jaxonnx._step_files.web import PACKAGE, VERSION

SCHEMES = {
    "int8": Quantization(),
    "int4": Quantization(weights="int4"),
    "blocks": Quantization(weights="int4", activations=None, block=16),
    "fp8": Quantization(weights="fp8", activations=None),
    "int2": Quantization(weights="int2", activations=None),
    "uint16": Quantization(activations="uint16"),
    "tensorrt": Quantization(dialect="tensorrt", activations="int8"),
    "qnn": Quantization(dialect="qnn", activations="uint16"),
}
PROGRAM = """
import fs from "node:fs"
import * as ort from "./node_modules/PACKAGE/dist/ort.node.min.mjs"

const given = fs.readFileSync("x.bin")
const numbers = new Float32Array(given.buffer, given.byteOffset, given.length / 4)
const x = new ort.Tensor("float32", numbers, SHAPE)
const found = {}
for (const name of NAMES) {
  const options = { executionProviders: ["wasm"], logSeverityLevel: 3 }
  const session = await ort.InferenceSession.create(fs.readFileSync(`${name}.onnx`), options)
  const outputs = await session.run({ [session.inputNames[0]]: x })
  found[name] = Array.from(outputs[session.outputNames[0]].data)
}
console.log(JSON.stringify(found))
"""


@pytest.mark.deep
def test_files_of_all_schemes_run_in_browsers(tmp_path, monkeypatch):
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm")
    monkeypatch.chdir(tmp_path)
    Path("package.json").write_text('{"type": "module"}')
    install = [npm, "install", "--silent", "--ignore-scripts", f"{PACKAGE}@{VERSION}"]
    if (done := subprocess.run(install, capture_output=True, text=True)).returncode:
        pytest.skip(f"npm did not bring {PACKAGE}: {done.stderr}")
    model, (x, _) = demo.model(), demo.digits()[0]
    for name, scheme in SCHEMES.items():
        jaxonnx.quantize(model, x[:64], scheme).save(f"{name}.onnx")
    x = x[:16]
    x.tofile("x.bin")
    program = PROGRAM.replace("PACKAGE", PACKAGE).replace("NAMES", json.dumps([*SCHEMES]))
    Path("run.js").write_text(program.replace("SHAPE", json.dumps(x.shape)))
    done = subprocess.run(["node", "run.js"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {*found} == {*SCHEMES}
    for name, theirs in found.items():
        mine = np.asarray(jaxonnx.load(f"{name}.onnx")(x))
        atol = 0.02 * np.abs(mine).max()  # ties that are rounded the other way
        np.testing.assert_allclose(np.reshape(theirs, mine.shape), mine, atol=atol, err_msg=name)
