"""Writes a scikit-learn MLP through skl2onnx, with goldens like those of make_exported.py.

The file ends in probabilities, and its loss is the mean negative logarithm of those of the labels.
"""

from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from skl2onnx import to_onnx
from sklearn.datasets import load_iris
from sklearn.neural_network import MLPClassifier

PATH = Path(__file__).parent / "sklearn_mlp.onnx"

if __name__ == "__main__":
    features, labels = load_iris(return_X_y=True)
    features = features.astype(np.float32)
    mlp = MLPClassifier((16, 8), max_iter=60, random_state=0).fit(features, labels)
    model = to_onnx(mlp, features[:1], options={"zipmap": False}, target_opset=17)
    onnx.save(model, PATH)

    floats = {
        t.name: numpy_helper.to_array(t)
        for t in model.graph.initializer
        if t.data_type == onnx.TensorProto.FLOAT
    }
    weights = [torch.from_numpy(np.float32(w)).requires_grad_() for w in mlp.coefs_]
    biases = [torch.from_numpy(np.float32(b)).requires_grad_() for b in mlp.intercepts_]
    x, y = features[::10], labels[::10]
    hidden = torch.from_numpy(x)
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        hidden = (torch.relu(hidden) if i else hidden) @ weight + bias
    loss = torch.nn.functional.cross_entropy(hidden, torch.from_numpy(y))
    loss.backward()

    gradients = {}
    for parameter in weights + biases:
        value = parameter.detach().numpy()
        (name,) = (k for k, v in floats.items() if np.array_equal(v.ravel(), value.ravel()))
        gradients[f"grad:{name}"] = parameter.grad.numpy().reshape(floats[name].shape)
    np.savez_compressed(
        PATH.with_suffix(".npz"),
        x=x,
        y=y,
        probabilities=torch.softmax(hidden, 1).detach().numpy(),
        loss=loss.detach().numpy(),
        **gradients,
    )
