"""The rules by which a tensor of a file is trained, kept as state, or left a constant.

A file does not say which of its tensors were learned. `RULES`, below, reads from top to bottom: of
the rules that fit a use of a tensor, the first one decides. A tensor that no rule
fits is a constant, and a tensor with several uses is trained if one of them says so.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from jaxonnx._graph.ancestors import ancestors, behind
from jaxonnx._graph.sites import ARITHMETIC, Site
from jaxonnx._io.protos import UNNAMED, own_name

STARTS = {"GRU": (5,), "LSTM": (5, 6), "RNN": (5,)}
"""The positions of initial states among the inputs of recurrent operators."""
_LARGE = 1e3
"""Larger magnitudes are those of additive masks (-1e4, -1e9), not of learned tables."""
_READ = 256
"""The most numbers of a tensor that are compared with each other."""
_RUN = 8
"""The mean length of runs of equal numbers, from which on they are no learned ones."""
_OPERANDS = {
    **dict.fromkeys(("Conv", "ConvTranspose", "GRU", "LSTM", "RNN", "GridSample"), (0,)),
    **dict.fromkeys(("GatherElements", "GatherND"), (0,)),
    **{"Pow": (0, 1), "ScatterElements": (0, 2), "ScatterND": (0, 2)},
}
"""Inputs besides those of arithmetic and Concat that are data, and seldom a network's own."""
_MOVES = ("Cast", "Identity", "Mul", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
_TABLE = re.compile(
    r"(.*_)?(inv_freq|window|mel(_(fb|basis|filters?|bank|scale))?|fb|fbank|filter_?banks?"
    r"|anchors?|(cos|sin)_cached?|freqs_cis)"
)
_STATISTIC = re.compile(r"(.*_)?(mean|std|action_(scale|bias))")
_WEIGHT = re.compile(r"(weight|bias|gamma|beta|kernel|scale_param)s?")


TRAINED, STATE, CONSTANT = "param", "state", "constant"
"""The verdicts of rules."""


@dataclass(frozen=True)
class Rule:
    """A rule for uses of tensors; its test's docstring says which networks or exporters need it."""

    name: str
    """A description of the tensor, as `print(model)` shows that of a constant."""
    verdict: str
    test: Callable[[Site], bool]
    file: str
    """A file of tests/data that would be trained otherwise without the rule."""


def judge(site: Site, chosen: bool = False) -> Rule | None:
    """Return the rule that decides; None where the tensor does not stand as a weight would.

    A rule for constants counts only where one below it would train the tensor. Numbers are dear to
    look at, so these rules come into play when there is one.

    Args:
      site: the use of the tensor.
      chosen: whether a user trains the tensor, so that no rule makes it a constant.
    """
    learned = (i for i, r in enumerate(RULES) if r.verdict != CONSTANT and r.test(site))
    place = next(learned, None)
    if place is None:
        return None
    above = () if chosen else (rule for rule in RULES[:place] if rule.verdict == CONSTANT)
    return next((rule for rule in above if rule.test(site)), RULES[place])


def judge_part(site: Site, result: Rule) -> Rule | None:
    """Return the rule for a tensor of which a value is computed, from the rule for that value."""
    if result.verdict == CONSTANT:
        return replace(result, name=f"{result.name} (computed from it)")
    return judge(replace(site, result_is_trained=True)) if result.verdict == TRAINED else None


def is_trained(site: Site) -> bool:
    """Check whether a rule trains the tensor for this use of it."""
    rule = judge(site)
    return rule is not None and rule.verdict == TRAINED


# Numbers that no training gives


def is_running_statistic(site: Site) -> bool:
    """Find the means and variances that BatchNormalization moves itself."""
    return site.role == "state"


def recognize(kind: str, file: str) -> Rule:
    """Return the rule for a kind of numbers (`Tensor.description`) that no training gives."""

    def is_of_kind(site: Site) -> bool:
        """Find these numbers."""
        return site.tensor.description == kind

    return Rule(kind, CONSTANT, is_of_kind, file)


# Normalizations written as arithmetic, by tf2onnx, Keras and older exporters of PyTorch


def is_stored_moment(site: Site) -> bool:
    """Find the mean, variance and epsilon of a BatchNormalization that is written as arithmetic."""
    return site.name in site.facts.normalized.statistics


def is_affine(site: Site) -> bool:
    """Find the scale and bias of a normalization that is written as ReduceMean, Sub, Sqrt, Div.

    They have up to as many axes as the mean is over.
    """
    axes = site.facts.normalized.learned.get(site.name)
    if axes is None or site.role not in (None, "vector"):
        return False
    return len(site.tensor.long) <= axes


# Operands of arithmetic that were not learned, whatever their names


def divides_weight(site: Site) -> bool:
    """Find the vectors of a spectral norm, which PyTorch moves by power iteration alone."""
    return site.name in site.facts.norms and site.meets_only_tensors


def is_mask(site: Site) -> bool:
    """Find masks of attention, which add -1e4 or -1e9, also with ALiBi folded into them."""
    several = site.is_table or site.role is None
    return site.meets_data and several and not site.tensor.largest < _LARGE


def standardizes(site: Site) -> bool:
    """Find mean and deviation of (x - mean) / deviation, which scikit-learn and others write."""
    partner = {"Sub": "Div", "Div": "Sub"}.get(site.operator)
    if partner is None or site.use.position != 1 or not site.meets_data:
        return False
    graph, node = site.facts.graph, site.node
    beside = [*graph.readers.get(node.outputs[0], ()), graph.producers.get(node.inputs[0])]
    partners = (n for n in beside if n is not None and n.op.name == partner)
    return any(n.inputs[1] not in site.facts.data for n in partners)


def is_distance(site: Site) -> bool:
    """Find ALiBi, which adds numbers to scores that are linear in the distance of query and key."""
    return site.meets_data and site.is_table and site.tensor.linear_in_distance


def has_one_norm(site: Site) -> bool:
    """Find sines and cosines of positions in any order of their columns, as sin^2 + cos^2 = 1."""
    table = site.meets_data and site.is_table and not biases_scores(site)
    return table and site.tensor.rows_have_one_norm


def is_averaged(site: Site) -> bool:
    """Find the bins 0, 1, 2, ... of a detector's distances, whose mean a Softmax weighs (DFL)."""
    if site.role not in ("param", "vector") or not (site.is_vector and site.tensor.evenly_spaced):
        return False
    producers, names = site.facts.graph.producers, site.others[:1]
    while names and (maker := producers.get(names[0])) and maker.op.name in _MOVES:
        names = maker.inputs[:1]
    return bool(names) and names[0] in producers and producers[names[0]].op.name == "Softmax"


def has_steps(site: Site) -> bool:
    """Find the strides by which a detector scales its boxes, one for all boxes of a feature map."""
    if not (site.meets_data and site.is_vector):
        return False
    numbers = site.tensor.value.reshape(-1).astype(np.float64)
    steps = np.diff(numbers)
    rises = int(np.count_nonzero(steps))
    whole = bool((steps >= 0).all() and (numbers == np.rint(numbers)).all())
    return whole and rises > 0 and _RUN * (rises + 1) <= len(numbers)


def is_grid(site: Site) -> bool:
    """Find coordinates that a layer multiplies as it does data: relative positions of Swin V2.

    Learned queries stand there, too, but their numbers seldom repeat, unless they are fresh.
    """
    first = site.operator in ("Gemm", "MatMul") and site.use.position == 0
    if not (first and site.tensor.irregular) or not site.facts.data.isdisjoint(site.others):
        return False
    numbers = site.tensor.value[site.tensor.value != 0][:_READ]
    return 2 * len(np.unique(numbers)) < len(numbers)


def is_outer_factor(site: Site) -> bool:
    """Find rotary frequencies (1, F, 1), expanded to meet positions (1, 1, T) in a MatMul.

    PyTorch's current exporter also expands the zeros that a recurrence starts from.
    """
    return site.is_outer_factor


# Names


def is_named_as_weight(site: Site) -> bool:
    """Trust a framework that calls a tensor a weight, where it stands as one."""
    named = _WEIGHT.fullmatch(site.last_name) is not None
    return named and any(rule.test(site) for rule in PLACES)


def is_named_as_buffer(site: Site) -> bool:
    """Trust names that buffers go by and weights do not; exporters keep them.

    Where an operator declares a weight, only buffers that layers read as matrices and kernels may
    stand. A bias of that name is a bias.
    """
    declared = site.role == "param"
    if declared and site.node.op.form(site.use.position) is None:
        return False
    names = (_TABLE,) if declared else (_TABLE, _STATISTIC)
    return any(name.fullmatch(site.last_name) for name in names)


# Places of constants


def is_in_program(site: Site) -> bool:
    """Find numbers of a network's program, such as x * [1, 7, 2], which become Constant nodes.

    Where the weights are Constant nodes, too, nothing tells the two apart.
    """
    place = site.result_is_trained or (site.in_main_graph and site.operator in ARITHMETIC)
    return place and site.facts.weights_stored and not site.tensor.stored


def is_in_front(site: Site) -> bool:
    """Find means and deviations of images or observations in front of the first layer.

    The other operand is an input that met no layer, layers follow, and none of them reads that
    input in another way, except for its sizes. An outer product (a table that meets each number of
    an input in each row) does not count.
    """
    facts, graph, node = site.facts, site.facts.graph, site.node
    if facts.on_inputs.get(node.index) is not node:
        return False
    if facts.before_layers.isdisjoint(node.outputs):
        return False
    makers = (graph.producers.get(name) for name in site.others)
    moved = ("Expand", "Reshape", "Unsqueeze")
    if site.is_table and any(maker is not None and maker.op.name in moved for maker in makers):
        return False
    sized = [node for node in graph.nodes if node.op.name not in ("Shape", "Size")]
    inputs = ancestors(sized, site.others) & {*graph.inputs}
    plain = [name for other in facts.on_inputs.values() for name in other.outputs]
    reached = behind(graph.nodes, inputs, plain)
    layers = (other for other in graph.nodes if other.index in facts.layers and other is not node)
    return all(reached.isdisjoint(layer.reads) for layer in layers)


def is_shown(site: Site) -> bool:
    """Find a recorded motion whose rows a policy that imitates it gives out beside its actions."""
    facts, node = site.facts, site.node
    looked_up = site.in_main_graph and site.operator == "Gather" and site.use.position == 0
    if not looked_up or facts.data.isdisjoint(site.others):
        return False
    if not facts.behind_layers.isdisjoint(node.inputs):
        return False
    shown = behind(facts.graph.nodes, node.outputs)
    acts = not facts.behind_layers.isdisjoint({*facts.graph.outputs} - shown)
    layers = (n for n in facts.graph.nodes if n.index in facts.layers and n is not node)
    return acts and all(shown.isdisjoint(layer.reads) for layer in layers)


def makes_waves(site: Site) -> bool:
    """Find random Fourier features, and rotary frequencies that are too few for a sequence.

    A layer with a sine behind it has no cosine.
    """
    if site.operator != "MatMul" or not site.in_main_graph:
        return False
    return {*site.facts.readers(site.node, (*_MOVES, "Concat"))} == {"Sin", "Cos"}


def is_filler(site: Site) -> bool:
    """Find ones and zeros that PyTorch's exporters add to a bare normalization or convolution.

    They are Constant nodes, or have a number for a name. The bias of a convolution is one zero,
    expanded.
    """
    op, position = site.node.op, site.use.position
    start = op.start(position)
    if "Normalization" not in op.name:
        is_bias = site.role == "param" and op.form(position) is None
        start = 0 if is_bias and site.use.view.expanded and site.tensor.array.size == 1 else None
    if start is None or not site.in_main_graph:
        return False
    apart = site.facts.weights_stored and not site.tensor.stored
    unnamed = apart or UNNAMED.fullmatch(own_name(site.name)) is not None
    return unnamed and bool((site.tensor.value == start).all())


# Places of weights


def is_declared(site: Site) -> bool:
    """Find weights that operators declare: kernels, matrices, tables, biases."""
    return site.role == "param"


def is_bias_or_scale(site: Site) -> bool:
    """Find biases that exporters write as Add, scales as Mul, and a bias that Sub takes from.

    A single number is a bias if it has an axis; a factor of sqrt(d) or an epsilon has none.
    """
    if site.role != "vector" or site.is_vector:
        return site.role == "vector"
    array = site.tensor.array
    return array.size == 1 and array.ndim > 0 and site.operator == "Add" and site.tensor.stored


def is_token(site: Site) -> bool:
    """Find a learned token (or a few) that a vision transformer puts before a sequence.

    The sequence has rank 3 with features along the last axis, and the Concat is along the first or
    second. The token is repeated for each example, also to a shape that the file computes (CLIP),
    unless the batch is one.
    """
    view, value = site.use.view, site.tensor.value
    if site.use.passes or site.operator != "Concat" or not site.tensor.stored:
        return False
    axis = site.node.attributes.get("axis", 1)
    if view.axes == (0,) and view.expanded:
        return axis == 1 and site.tensor.irregular
    if view.axes is None or len(view.axes) != 3 or view.part or axis % 3 == 2:
        return False
    lengths = [1 if a is None else value.shape[a] for a in view.axes]
    if lengths[2] == 1 or lengths[1 - axis % 3] != 1:
        return False
    return view.expanded or len(np.unique(value)) > 2


def has_normalized_rows(site: Site) -> bool:
    """Find the table of relative positions whose rows DeBERTa normalizes."""
    name = site.node.op.name
    normalizes = name.endswith("LayerNormalization") and site.use.position == 0
    table = normalizes and site.tensor.stored and site.tensor.value.ndim > 1
    return table and site.tensor.irregular


def starts_recurrence(site: Site) -> bool:
    """Find learned initial states; those that an exporter writes for none are zeros."""
    start = site.in_main_graph and site.use.position in STARTS.get(site.operator, ())
    return start and site.tensor.stored and site.tensor.irregular and site.tensor.is_varied


def biases_scores(site: Site) -> bool:
    """Find relative positions that Swin and T5 add to scores, as exporters gathered them."""
    if not (site.meets_data and site.operator == "Add" and site.is_table and site.tensor.stored):
        return False
    readers = site.facts.readers(site.node, ("Add", "Cast", "Reshape", "Where"))
    return site.tensor.irregular and "Softmax" in readers


def is_varied_operand(site: Site) -> bool:
    """Find gates, thresholds, positions, centers and mixed kernels in plain arithmetic with data.

    So do learned features that are joined to those of data, tables that PyTorch indexes as
    `table[ids]` (GatherND), and the constant that StyleGAN's convolutions start from.
    Buffers do so as well, but their numbers repeat, count, or are whole, as the sizes of a
    detector's anchors in pixels.
    """
    mixed = site.use.position in _OPERANDS.get(site.operator, ())
    if site.operator == "Concat":  # of a known place in a sequence, `is_token` decides
        rank = len(site.use.view.axes or ())
        mixed = rank != 3 or site.node.attributes.get("axis", 1) % 3 == 2
    operand = site.meets_data or (mixed and site.in_main_graph and not site.use.passes)
    if not (operand and site.tensor.stored and site.facts.layers):
        return False
    if not (site.tensor.irregular and site.tensor.is_varied):
        return False
    numbers = site.tensor.value.astype(np.float64)
    return site.tensor.largest <= 1 or bool((numbers != np.rint(numbers)).any())


def gives_weight(site: Site) -> bool:
    """Find the tensors of exp(A_log) of Mamba, g * v / |v| and of weights under masks.

    A mask among them has two different numbers.
    """
    if not site.result_is_trained:
        return False
    value = site.tensor.value
    vector = site.is_vector and (value.size == 2 or len(np.unique(value)) != 2)
    return vector or site.tensor.irregular


PLACES = (
    Rule("a weight or bias of an operator", TRAINED, is_declared, "sklearn_mlp.onnx"),
    Rule("a bias or scale in arithmetic", TRAINED, is_bias_or_scale, "families/paddle_cnn.onnx"),
    Rule("a token before a sequence", TRAINED, is_token, "rules/patches.onnx"),
    Rule("rows that are normalized", TRAINED, has_normalized_rows, "rules/scores.onnx"),
    Rule("the initial state of a recurrence", TRAINED, starts_recurrence, "rules/features.onnx"),
    Rule("a bias of attention scores", TRAINED, biases_scores, "rules/scores.onnx"),
    Rule("varied numbers that meet data", TRAINED, is_varied_operand, "unfolded.attention.onnx"),
    Rule("a weight is computed from it", TRAINED, gives_weight, "rules/scores.onnx"),
)
"""The rules that train a tensor for the place where it stands."""

RULES = (
    Rule("a running statistic", STATE, is_running_statistic, "families/paddle_cnn.onnx"),
    # numbers that no training gives
    # frequencies of rotary positions (`inv_freq`), slopes of ALiBi
    recognize("a geometric sequence", "rules/levels.onnx"),
    # numbers whose mean is predicted: cents of pitch, bins of a detector's distances
    recognize("an arithmetic sequence", "rules/levels.onnx"),
    # windows by which front ends for audio multiply frames: Hann, Hamming, Povey, Gauss
    recognize("a window", "rules/pitch.onnx"),
    # bases of Fourier and cosine transforms (matrices, kernels), tables of positions
    recognize("rows of sinusoids", "rules/pitch.onnx"),
    # the mel or ERB bank that follows a Fourier transform as a linear layer would
    recognize("a bank of filters", "rules/pitch.onnx"),
    # blurs before downsampling and Sobel's kernels, which stand at a Conv
    recognize("kernels with mirror symmetry", "rules/patches.onnx"),
    # normalizations that are written as arithmetic
    Rule("a stored mean or variance", CONSTANT, is_stored_moment, "families/tf2onnx_cnn.onnx"),
    Rule("scales or shifts what is normalized", TRAINED, is_affine, "unfolded.attention.onnx"),
    # operands that are no weights, whatever their names
    Rule("of a norm that divides a weight", CONSTANT, divides_weight, "rules/norms.onnx"),
    Rule("a mask", CONSTANT, is_mask, "rules/scores.onnx"),
    Rule("standardizes features", CONSTANT, standardizes, "zoo/vector.onnx"),
    Rule("linear in a distance, as ALiBi", CONSTANT, is_distance, "rules/scores.onnx"),
    Rule("rows of one norm, as sinusoids have", CONSTANT, has_one_norm, "rules/patches.onnx"),
    Rule("averaged by a Softmax", CONSTANT, is_averaged, "rules/levels.onnx"),
    Rule("whole numbers in steps", CONSTANT, has_steps, "rules/levels.onnx"),
    Rule("coordinates before a layer", CONSTANT, is_grid, "rules/coordinates.onnx"),
    Rule("expanded along the sum of a product", CONSTANT, is_outer_factor, "zoo/sequence.onnx"),
    # names
    Rule("named as a weight", TRAINED, is_named_as_weight, "rules/patches.onnx"),
    Rule("named as a buffer", CONSTANT, is_named_as_buffer, "rules/policy.onnx"),
    # places of constants, and then those of weights
    Rule("in a Constant node, unlike the weights", CONSTANT, is_in_program, "rules/patches.onnx"),
    Rule("meets only inputs before the first layer", CONSTANT, is_in_front, "rules/policy.onnx"),
    Rule("its rows are outputs as they are", CONSTANT, is_shown, "rules/policy.onnx"),
    Rule("its products go to Sin and Cos alone", CONSTANT, makes_waves, "rules/features.onnx"),
    Rule("no scale or bias, but a filler", CONSTANT, is_filler, "families/torch_unet_half.onnx"),
    *PLACES,
)
"""All rules; of those that fit, the first decides."""
