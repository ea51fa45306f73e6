"""`Model`, a loaded ONNX file, and `load`, which reads one."""

from jaxonnx._graph.select import labels
from jaxonnx._graph.values import Value
from jaxonnx.model._add_training import add_training
from jaxonnx.model._convert import convert, raise_opset
from jaxonnx.model._load import as_model, load
from jaxonnx.model._model import Model, Trainable
from jaxonnx.model._predict import read_inputs
from jaxonnx.model._save import (
    check_nodes,
    compare_merged,
    fill_source,
    record_scores,
    to_proto,
)
from jaxonnx.model._show import operator_name
from jaxonnx.model._sparsity import report_layers
from jaxonnx.model._stack import Stack, stack
from jaxonnx.model._statistics import (
    MOST,
    apply_totals,
    batch_norms,
    find_single_values,
    pool_batch,
    renew_statistics,
    zero_totals,
)
from jaxonnx.model._transforms import (
    add_states,
    fit_to_batch,
    inputs_alone,
    start_at_zeros,
    with_any_batch,
    with_whole_inputs,
)
