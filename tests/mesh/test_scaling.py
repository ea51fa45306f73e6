"""What training steps send between devices (`benchmarks.compiled.scaling`)."""

import os
import subprocess
import sys

import pytest

from benchmarks.compiled.scaling import collectives

PROGRAM = """\
HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[], f32[4]{0}) parameter(0)
  %x = f32[4]{0} get-tuple-element(%p), index=1
  %all-gather.1 = bf16[8,2]{1,0} all-gather(%x), replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %t = (s32[], f32[4]{0}) tuple(%i, %x)
}

%condition (p: (s32[], f32[4])) -> pred[] {
  %p = (s32[], f32[4]{0}) parameter(0)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %all-reduce = (f32[3,5]{1,0}, /*index=1*/f32[]) all-reduce(%x, %y), channel_id=1, to_apply=%add
  %scattered = f32[2]{0} reduce-scatter(%x), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %while = (s32[], f32[4]{0}) while(%t), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"7"}}
}
"""


def test_bytes_of_collectives():
    sent = collectives(PROGRAM)
    assert sent.count == {"all-reduce": 1, "all-gather": 7, "reduce-scatter": 1}
    assert sent.bytes == {"all-reduce": 64, "all-gather": 7 * 32, "reduce-scatter": 32}


STEPS = """
import sys
import jax
from benchmarks.networks import NETWORKS, Network
from benchmarks.compiled.scaling import SYSTEMS, collectives, compiled, fake, placed

fake(int(sys.argv[1]))


def cnn(layers, x):
    # enough channels for Winograd's transforms
    for _ in range(2):
        x = layers.relu(layers.batch_norm(layers.conv(x, 48, 3, pad=1)))
    return layers.dense(layers.flatten(x), 10)


def lstm(layers, x):
    return layers.dense(layers.lstm(x, 16), 10)


OWN = {"cnn": Network(cnn, (4, 48, 8, 8), 10), "recurrent": Network(lstm, (4, 12, 8), 10)}


def sent(system, name, sharding):
    network = {**NETWORKS, **OWN}[name]
    step = SYSTEMS[system](network, 8 * network.shape[0])
    params = step.carry.params if system == "jaxonnx" else step.carry[0]
    weights = sum(4 * w.size for w in jax.tree.leaves(params))
    return collectives(compiled(step, sharding, 8).as_text()), weights


def gathered(name):
    devices = int(sys.argv[1])
    network = NETWORKS[name]
    step = SYSTEMS["jaxonnx"](network, devices * network.shape[0])
    weights = placed(step, "fsdp", devices).carry.params.values()
    split = [w for w in weights if any(w.sharding.spec)]
    assert split
    expected = sum(4 * w.size for w in [*weights, *split])
    found = collectives(compiled(step, "fsdp", devices).as_text())
    assert found.total <= 1.1 * expected, (name, found, found.bytes, expected)
"""


def on_devices(program, count=8):
    command = [sys.executable, "-W", "ignore", "-c", STEPS + program, str(count)]
    subprocess.run(command, check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})


@pytest.mark.deep
def test_on_eight_devices():
    """Gradients are all that is sent, of LoRA those of its adapters; Flax by hand sends no less.

    What is split is gathered once, and no batch is.
    """
    on_devices("""
import optax
import jaxonnx
from jaxonnx import demo
from benchmarks.compiled.scaling import Step

for name in ("cnn", "recurrent"):
    found, weights = sent("jaxonnx", name, "data")
    assert set(found.count) == {"all-reduce"}, (name, found)
    # two biases of an LSTM have one gradient
    assert 0.9 * weights < found.total < 1.1 * weights, (name, found, weights)

one = jaxonnx.training.step(
    demo.mlp(256), "softmax_cross_entropy_with_integer_labels", optax.sgd(0.1),
    lora=jaxonnx.LoRA(rank=2),
)
x, y, weight = (jax.ShapeDtypeStruct((64, *shape), kind) for shape, kind in
                [((1, 8, 8), "float32"), ((), "int32"), ((), "float32")])
step = Step(one.update, one.init(), jaxonnx.training.Batch((x,), y, weight), (one.frozen,))
found = collectives(compiled(step, "data", 8).as_text())
weights = sum(4 * w.size for w in jax.tree.leaves(step.carry.params))
assert set(found.count) == {"all-reduce"}, found
assert 0.9 * weights < found.total < 1.1 * weights, (found, found.bytes, weights)

gathered("lstm")
for name in ("cnn", "encoder"):
    ours, flax = (sent(system, name, "fsdp")[0] for system in SYSTEMS)
    assert ours.total <= 1.1 * flax.total, (name, ours, ours.bytes, flax, flax.bytes)
""")


@pytest.mark.deep
def test_what_is_split_is_gathered_once_and_no_batch_is_on_128_devices():
    """Left alone XLA gathers the rows of 128 devices that have a column of the weight each."""
    on_devices('gathered("lenet")', 128)
