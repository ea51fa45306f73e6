"""Docstrings open with a verb in the imperative and a noun, as those of optax and JAX do."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "jaxonnx"
NOUN = re.compile("An?|All|Any|Each|Every|For|How|Of|One|The|Those|What|Where|Whether|Which|Who")
"""Openings of sentences that have no verb in front."""
PRONOUN = re.compile(r"\w+ (what|how|which)\b|Return that\b")
"""A verb and a pronoun, where the thing that is returned has a name."""


def functions(tree):
    """Functions and methods with a docstring; not properties, and not operators."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            marks = [ast.unparse(mark) for mark in node.decorator_list]
            plain = not any(
                "property" in mark or mark.startswith(("op(", "activation(")) for mark in marks
            )
            if plain and ast.get_docstring(node):
                yield node.name, ast.get_docstring(node)
        yield from functions(node)


def third_person(word):
    """Return whether a word looks like "Returns" or "Raises"."""
    return word.endswith("s") and not word.endswith("ss") and word[0].isupper()


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.stem)
def test_docstrings_open_with_a_verb_and_a_noun(path):
    wrong = []
    for name, text in functions(ast.parse(path.read_text())):
        first = text.split()[0].strip(",.:;")
        if NOUN.fullmatch(first) or third_person(first) or PRONOUN.match(text):
            wrong.append(f"{name}: {text.splitlines()[0]}")
    assert not wrong
