"""DoRA against PEFT (`use_dora=True`): losses, adapters and merged weights, and its folders."""

import jax
import jax.numpy as jnp
import numpy as np
import onnx.parser
import optax
import pytest
from onnx import numpy_helper

import jaxonnx

peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")

TEXT = """<ir_version: 9, opset_import: ["": 17]>
g (float[n,2,6,6] x) => (float[n,4] y) {
  c = Conv <strides = [2, 2]> (x, conv_weight, conv_bias)
  r = Relu(c)
  f = Flatten(r)
  h = Gemm <transB = 1> (f, hidden_weight, hidden_bias)
  t = Tanh(h)
  y = Gemm <transB = 1> (t, last_weight, last_bias)
}
"""
STEPS, SIZE = 12, 16


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 6, 3, 2)
        self.hidden = torch.nn.Linear(24, 10)
        self.last = torch.nn.Linear(10, 4)

    def forward(self, x):
        x = torch.relu(self.conv(x)).flatten(1)
        return self.last(torch.tanh(self.hidden(x)))


def nets(modules, **settings):
    """PEFT's network with changed adapters, and the file of its base."""
    torch.manual_seed(0)
    base = Net()
    proto = onnx.parser.parse_model(TEXT)
    for node in proto.graph.node:
        node.input[:] = [name.replace("_", ".") for name in node.input]
    for name, value in base.state_dict().items():
        proto.graph.initializer.append(numpy_helper.from_array(value.numpy().copy(), name))
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=modules, use_dora=True, use_rslora=False, **settings
    )
    net = peft.get_peft_model(base, config)
    for name, value in net.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.05)
    return net, jaxonnx.load(proto)


def adapters_of(net, model, modules):
    """What PEFT trains, by our names and in our shapes."""
    found = {}
    for module in modules:
        layer = net.base_model.model.get_submodule(module)
        arrays = {
            "A": layer.lora_A["default"].weight,
            "B": layer.lora_B["default"].weight,
            "magnitude": layer.lora_magnitude_vector["default"].weight,
        }
        for end, value in arrays.items():
            value = value.detach().numpy().copy()
            shape = (value.size,) if end == "magnitude" else (len(value), -1)
            found[f"{module}.weight.lora_{end}"] = value.reshape(shape)
    return found


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_trajectory_of_peft(optimizer):
    modules = ["conv", "hidden", "last"]
    net, model = nets(modules)
    where = [f"{module}.weight" for module in modules]
    lora = jaxonnx.LoRA(3, alpha=5, where=where, dora=True)
    start = lora.attach(model, jax.random.key(0))
    values = {name: jnp.asarray(v) for name, v in adapters_of(net, model, modules).items()}
    assert start.params.keys() == values.keys()
    draw = np.random.default_rng(1)
    x = draw.standard_normal((STEPS, SIZE, 2, 6, 6)).astype(np.float32)
    y = draw.integers(0, 4, (STEPS, SIZE))
    ours = {"sgd": optax.sgd(0.3, 0.9), "adam": optax.adam(1e-2)}[optimizer]
    result = jaxonnx.train(
        start.replace(params=values),
        [*zip(x, y, strict=True)],
        loss="softmax_cross_entropy_with_integer_labels",
        optimizer=ours,
    )
    trained = [value for value in net.parameters() if value.requires_grad]
    theirs = {
        "sgd": lambda: torch.optim.SGD(trained, 0.3, 0.9),
        "adam": lambda: torch.optim.Adam(trained, 1e-2),
    }[optimizer]()
    losses = []
    for one, labels in zip(x, y, strict=True):
        loss = torch.nn.functional.cross_entropy(
            net(torch.from_numpy(one)), torch.from_numpy(labels)
        )
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        losses.append(loss.item())
    close = {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(result.history.losses, losses, **close)
    for name, value in adapters_of(net, model, modules).items():
        np.testing.assert_allclose(result.model.params[name], value, **close, err_msg=name)
        assert np.abs(value - values[name]).max() > 1e-3
    merged = net.merge_and_unload().state_dict()
    for name, value in result.model.merge_adapters().params.items():
        np.testing.assert_allclose(value, merged[name].numpy(), **close, err_msg=name)


@pytest.mark.parametrize("settings", [{}, {"rank_pattern": {"last": 2}}])
def test_folders_of_peft(settings, tmp_path):
    modules = ["hidden", "last"]
    net, model = nets(modules, **settings)
    with torch.no_grad():
        for name, value in net.named_parameters():
            if "magnitude" in name:
                value.mul_(1 + 0.3 * torch.rand(value.shape))
    net.save_pretrained(tmp_path / "theirs")
    x = np.random.default_rng(2).standard_normal((5, 2, 6, 6)).astype(np.float32)

    def outputs(net):
        with torch.no_grad():
            return net.eval()(torch.from_numpy(x)).numpy()

    adapters = jaxonnx.Adapters.load(tmp_path / "theirs", model)
    np.testing.assert_allclose(adapters.attach(model)(x), outputs(net), rtol=1e-4, atol=1e-5)
    adapters.save(f"{tmp_path}/ours/")
    fresh = Net()
    fresh.load_state_dict({n: torch.from_numpy(np.array(v)) for n, v in model.params.items()})
    again = peft.PeftModel.from_pretrained(fresh, tmp_path / "ours")
    np.testing.assert_allclose(outputs(again), outputs(net), rtol=1e-4, atol=1e-5)
