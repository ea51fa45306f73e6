"""The training that a file carries (`ModelProto.training_info`) as pure functions.

ONNX describes a training model as a stateful object with three methods (IR.md, "Model Semantics"
and "Training Related Information"); here the state goes in and comes out instead. The state holds
the state variables, that is the initializers named by the keys of the bindings, and nothing else.

A training step evaluates one combined graph, the inference graph followed by the algorithm, in
one scope: an algorithm reads inference tensors by name, and Gradient differentiates through them.
"""

# for other rooms of the package
from jaxonnx.training_info._add import add
from jaxonnx.training_info._run import Training

__all__ = ["Training"]
