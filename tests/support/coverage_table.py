"""The tables of the page on operators: what a run of the tests shows of each.

    python -m pytest -m "deep or not deep" --junitxml=results.xml
    python -m tests.support.coverage_table results.xml

Several files of results are read together. The tables are put between the markers
of jaxonnx/docs/operators.md.
"""

import re
import sys
import warnings
import xml.etree.ElementTree
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import onnx
from onnx import AttributeProto
from onnx.backend.test.loader import load_model_tests

from jaxonnx.registry import operators
from tests.ops.case_table import schema_versions
from tests.ops.contrib_table import CASES as FUSED
from tests.ops.operator_cases import CASES
from tests.oracles.test_onnx_suite import UNWRITTEN
from tests.support.paths import ROOT

PAGE = ROOT / "jaxonnx" / "docs" / "operators.md"
MARKERS = "<!-- coverage -->", "<!-- /coverage -->"
COLUMNS = {
    "test_forward": "forward",
    "test_jit": "jit",
    "test_gradient": "grad",
    "test_vmap": "jit vmap",
}
FUSED_COLUMNS = {"test_gradients": "grad", "test_vmap": "vmap"}
NAMES = ("forward", "jit", "grad", "vmap")
KINDS = {"Node": "node", "Simple": "simple", "PyTorchConverted": "pytorch-converted"}
KINDS |= {"PyTorchOperator": "pytorch-operator", "Real": "real"}
PLAIN = [
    # Operators outside the tables of cases: a test, what it shows, and of which operators.
    ("control_flow", "test_if_of_every_version", "forward", "If"),
    (
        "control_flow",
        "test_a_traced_condition_is_compiled_differentiable_and_batched",
        "jit grad vmap",
        "If",
    ),
    ("control_flow", "test_loop_of_every_version", "forward", "Loop"),
    (
        "control_flow",
        "test_a_known_trip_count_is_a_scan_with_gradients_both_ways",
        "jit grad vmap",
        "Loop",
    ),
    (
        "control_flow",
        "test_scan_along_axes_and_directions_of_every_version",
        "forward jit grad vmap",
        "Scan",
    ),
    (
        "sequence",
        "test_editing_is_compiled_differentiable_and_batched",
        "forward jit grad vmap",
        "SequenceEmpty SequenceInsert SequenceConstruct SequenceErase SequenceAt SequenceLength "
        "ConcatFromSequence",
    ),
    ("sequence", "test_split_and_join", "forward jit grad vmap", "SplitToSequence"),
    ("sequence", "test_map_over_several_sequences", "forward jit grad vmap", "SequenceMap"),
    (
        "sequence",
        "test_optionals",
        "forward jit grad vmap",
        "Optional OptionalGetElement OptionalHasElement",
    ),
    ("text", "test_string_normalizer", "forward", "StringNormalizer"),
    ("text", "test_regex_is_read_as_re2_does", "forward", "RegexFullMatch"),
    ("text", "test_concat_and_split_of_every_rank", "forward", "StringConcat StringSplit"),
    ("text", "test_tfidf", "forward", "TfIdfVectorizer"),
    ("random", "test_normal_moments", "forward jit", "RandomNormal RandomNormalLike"),
    (
        "random",
        "test_uniform_moments_and_support",
        "forward jit",
        "RandomUniform RandomUniformLike",
    ),
    ("random", "test_bernoulli_frequency", "forward jit", "Bernoulli"),
    ("random", "test_multinomial_frequencies", "forward jit", "Multinomial"),
    ("optim", "test_adam_trajectory", "forward jit", "Adam"),
    ("optim", "test_adagrad_trajectory", "forward jit", "Adagrad"),
    ("optim", "test_momentum_trajectory", "forward jit", "Momentum"),
    ("gradient", "test_several_xs_and_a_z", "forward", "Gradient"),
    ("gradient", "test_second_and_third_order", "grad", "Gradient"),
    ("contrib", "test_bias_dropout_drops_in_training_only", "forward", "BiasDropout"),
    ("ml", "test_zip_map", "forward", "ZipMap"),
    ("ml", "test_cast_map", "forward", "CastMap"),
    ("ml", "test_dict_vectorizer", "forward", "DictVectorizer"),
]


def results(paths: list[str]) -> Iterator[tuple[str, str, str, str]]:
    """(module, test, parameters, "passed" | "failed" | "skipped") of every test."""
    for path in paths:
        for case in xml.etree.ElementTree.parse(path).iter("testcase"):
            outcome = {element.tag for element in case}
            failed = outcome & {"failure", "error"}
            test, _, parameters = case.get("name", "").partition("[")
            yield (
                "test_" + case.get("classname", "").partition(".test_")[2],
                test,
                parameters.removesuffix("]"),
                "failed" if failed else "skipped" if "skipped" in outcome else "passed",
            )


def shown(module: str, test: str, parameters: str) -> Iterator[tuple[tuple[str, str], str]]:
    """Pairs of an operator (domain, name) and the column that the test speaks about."""
    if module == "test_operators" and test in COLUMNS:
        case = next(c.values[0] for c in CASES if c.id == parameters)
        yield from (((case.domain, case.op), column) for column in COLUMNS[test].split())
    elif module == "test_contrib" and test in ("test_same_as_onnxruntime", *FUSED_COLUMNS):
        name = parameters.split("-")[0]
        domain = next(case.domain for case in FUSED if case.op == name)
        if test in FUSED_COLUMNS:
            yield (domain, name), FUSED_COLUMNS[test]
        else:
            yield (domain, name), "forward"
            if parameters.endswith("-jit"):
                yield (domain, name), "jit"
    for plain_module, plain_test, columns, names in PLAIN:
        if (module, test) == (f"test_{plain_module}", plain_test):
            for name in names.split():
                domain = next(o.domain for o in operators() if o.name == name)
                yield from (((domain, name), column) for column in columns.split())


def operators_of(graph) -> Iterator[tuple[str, str]]:
    """The operators of a graph and of the graphs inside it."""
    for node in graph.node:
        yield ("" if node.domain == "ai.onnx" else node.domain, node.op_type)
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from operators_of(attribute.g)


def suite_operators() -> dict[str, set[tuple[str, str]]]:
    """The operators of each case of ONNX's suite, by the case's name; not of the large models."""
    found = {}
    for kind in ("node", "simple", "pytorch-converted", "pytorch-operator"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the suite computes its data with overflows
            for case in load_model_tests(kind=kind):
                model = case.model or onnx.load(Path(case.model_dir) / "model.onnx")
                found[f"{case.name}_cpu"] = set(operators_of(model.graph))
    return found | {case.name: set(operators_of(case.model.graph)) for case in UNWRITTEN}


def main(paths: list[str]) -> None:
    """Reads the results, prints a summary and renews the tables of the page."""
    outcomes: dict[tuple, list[bool]] = defaultdict(list)
    kinds: dict[str, Counter] = defaultdict(Counter)
    passed: Counter = Counter()
    inside = suite_operators()
    for module, test, parameters, outcome in results(paths):
        suite = re.fullmatch(r"test_onnx_suite\.OnnxBackend(\w+?)ModelTest", module)
        if suite and test.endswith("_cpu"):
            kinds[KINDS[suite[1]]][outcome] += 1
            passed.update(inside.get(test, ()) if outcome == "passed" else ())
        elif (module, test) == ("test_onnx_suite", "test_models_that_are_not_on_disk"):
            kinds["model"][outcome] += 1
            passed.update(inside[parameters] if outcome == "passed" else ())
        elif outcome != "skipped":
            for operator, column in shown(module, test, parameters):
                outcomes[operator, column].append(outcome == "passed")
    versions: dict[tuple[str, str], list[int]] = defaultdict(list)
    for op in operators():
        versions[op.domain, op.name].append(op.since)
    versions |= {key: since for key, since in schema_versions().items() if key in versions}
    text = render(outcomes, kinds, passed, versions)
    before, _, rest = PAGE.read_text().partition(MARKERS[0])
    PAGE.write_text(f"{before}{MARKERS[0]}\n{text}{MARKERS[1]}{rest.partition(MARKERS[1])[2]}")
    print(text.split("<details>")[0])


def render(outcomes, kinds, passed, versions) -> str:
    """Markdown: two short tables, and the long one folded."""
    lines = ["| cases of ONNX's suite | passed | failed | left out |", "|---|---|---|---|"]
    for kind, count in kinds.items():
        lines.append(f"| {kind} | {count['passed']} | {count['failed']} | {count['skipped']} |")
    total = sum(kinds.values(), Counter())
    lines.append(f"| all | {total['passed']} | {total['failed']} | {total['skipped']} |")
    lines += ["", f"| domain | operators | versions | {' | '.join(NAMES)} |", "|---" * 7 + "|"]
    for domain in sorted({domain for domain, _ in versions}):
        names = [key for key in versions if key[0] == domain]
        columns = [sum(mark(outcomes, key, c) == "✓" for key in names) for c in NAMES]
        count = sum(len(versions[key]) for key in names)
        cells = [domain or "ai.onnx", len(names), count, *columns]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += [
        "",
        "✓: every case passes; ✗: one fails; –: none (no gradient, strings, results whose",
    ]
    lines += [
        "shape depends on values, nothing to batch). The last column counts the suite's cases"
    ]
    lines += ["that pass and contain the operator.", "", "<details>"]
    lines += ["<summary>Every operator</summary>", ""]
    lines += [f"| operator | versions | {' | '.join(NAMES)} | suite |", "|---" * 7 + "|"]
    for key in sorted(versions):
        name = key[1] if not key[0] else f"{key[0]}.{key[1]}"
        marks = [mark(outcomes, key, column) for column in NAMES]
        since = ", ".join(map(str, versions[key]))
        lines.append(f"| {name} | {since} | {' | '.join(marks)} | {passed[key] or '–'} |")
    return "\n".join([*lines, "", "</details>", ""])


def mark(outcomes, operator: tuple[str, str], column: str) -> str:
    found = outcomes.get((operator, column))
    return "–" if not found else "✓" if all(found) else "✗"


if __name__ == "__main__":
    main(sys.argv[1:])
