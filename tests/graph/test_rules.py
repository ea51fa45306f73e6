"""The table of what is trained: each rule is needed by a file of tests/data, which it names."""

import re

import pytest

import jaxonnx
from jaxonnx._graph import rules
from jaxonnx._graph.rules import RULES
from tests.oracles.zoo_compare import Golden, compare
from tests.support.paths import DATA, ROOT


@pytest.fixture(scope="module")
def trained_with_all_rules():
    """What is trained and what is state, by file."""
    return {file: learn(file) for file in dict.fromkeys(rule.file for rule in RULES)}


def learn(file):
    model = jaxonnx.load(DATA / file)
    return {*model.params}, {*model._places.roles.of.items()}


@pytest.mark.filterwarnings("ignore:.*the embedding and the output layer are one weight")
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_file_needs_the_rule(rule, trained_with_all_rules, monkeypatch):
    for table in ("RULES", "PLACES"):
        without = tuple(r for r in getattr(rules, table) if r is not rule)
        monkeypatch.setattr(rules, table, without)
    assert learn(rule.file) != trained_with_all_rules[rule.file]


def test_rules_say_what_they_are_for():
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.test.__doc__, f"nobody is said to need '{rule.name}'"


def test_the_summary_says_why_tensors_are_constants():
    notes = [layer.notes for layer in jaxonnx.load(DATA / "rules" / "policy.onnx").summary().layers]
    assert "action_scale: named as a buffer" in notes
    assert "motion: its rows are outputs as they are" in notes


def test_the_page_has_the_table():
    page = (ROOT / "jaxonnx" / "docs" / "training.md").read_text().partition("| rule |")[2]
    rows = re.findall(r"^\| ([^|]+) \| (state|constant|trained) \|", page, re.MULTILINE)
    verdicts = {"param": "trained", "state": "state", "constant": "constant"}
    assert rows == [(rule.name, verdicts[rule.verdict]) for rule in RULES]


@pytest.mark.parametrize("path", sorted((DATA / "rules").glob("*.onnx")), ids=lambda p: p.stem)
def test_what_is_trained_is_what_pytorch_trains(path):
    golden = Golden.read(path.with_suffix(".npz"))
    assert [f for f in compare(path.read_bytes(), golden, run=False) if not f.why] == []
