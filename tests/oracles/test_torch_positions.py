"""Vision transformers whose positions are resized to the image, against PyTorch.

Needs torch and transformers; CI has neither.
"""

import io

import jax
import numpy as np
import pytest

import jaxonnx

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 28,
    "patch_size": 7,
}


@pytest.mark.parametrize("sizes_are_open", [False, True])
@pytest.mark.parametrize("name", ["Dinov2", "ViT", "Beit"])
def test_resized_positions_have_the_gradient_of_pytorch(name, sizes_are_open):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    more = {"use_absolute_position_embeddings": True} if name == "Beit" else {}
    network = getattr(transformers, f"{name}Model")
    network = network(getattr(transformers, f"{name}Config")(**SIZES, **more)).eval()
    resizes = {} if name == "Dinov2" else {"interpolate_pos_encoding": True}
    positions = network.embeddings.position_embeddings
    with torch.no_grad():
        positions.normal_()
        network.embeddings.cls_token.normal_()

    class Tokens(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network

        def forward(self, x):
            return self.network(x, **resizes).last_hidden_state

    x, file = torch.randn(2, 3, 42, 35), io.BytesIO()
    y = Tokens()(x)
    weights = torch.randn_like(y)
    (y * weights).sum().backward()
    axes = {"x": {0: "n", 2: "h", 3: "w"}} if sizes_are_open else None
    with pytest.warns():  # of TorchScript's exporter and its tracer
        torch.onnx.export(
            Tokens(), (x,), file, opset_version=17, dynamo=False, input_names=["x"],
            output_names=["y"], dynamic_axes=axes,
        )  # fmt: skip
    model = jaxonnx.load(file.getvalue())
    gradients = jax.grad(lambda params: (model.apply(params, x.numpy()) * weights.numpy()).sum())(
        model.params
    )
    # the exporter cuts the positions of the patches off and keeps, or folds, the rest
    wanted = positions.grad.numpy()
    shapes = {wanted.shape: wanted, wanted[:, 1:].shape: wanted[:, 1:]}
    found = [np.asarray(g) for n, g in gradients.items() if "cls" not in n and g.shape in shapes]
    assert any(np.allclose(g, shapes[g.shape], rtol=1e-3, atol=1e-4) for g in found)
    assert sum(p.numel() for p in network.parameters() if p.grad is not None) <= sum(
        value.size for value in model.params.values()
    )
