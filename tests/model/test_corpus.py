"""Every file of `tests/data` is saved behind every change of a Model as it was before."""

import json
import zlib

import pytest

from tests.support import corpus

STORED = json.loads(corpus.STORED.read_text())
CASES = [(str(path.relative_to(corpus.DATA)), change) for path, change in corpus.stored_cases()]
SMALL = 30_000
"""The bytes of a file that is quick to change."""


def compare(cases):
    """List the files that are saved otherwise than stored."""
    different = []
    for name, change in cases:
        row = STORED.get(name, {})
        expected = row.get(change, row.get("as loaded", "nothing"))
        actual = corpus.digest_for_all(corpus.DATA / name, change)
        if actual != expected:
            different.append(f"{name} | {change}: {expected} is stored, {actual} is saved")
    return different


def advise(different):
    return "\n".join(
        (
            *different,
            "if these files are to change, run python -m tests.support.corpus --stored,",
            "and say in the commit why",
        )
    )


def choose_sample():
    """Choose a small file for each change."""
    small = [case for case in CASES if (corpus.DATA / case[0]).stat().st_size < SMALL]
    for change in corpus.CHANGES:
        cases = [case for case in small if case[1] == change]
        refused = {case for case in cases if STORED.get(case[0], {}).get(change, "").isalpha()}
        yield from sorted(cases, key=lambda c: (c in refused, zlib.crc32("".join(c).encode())))[:1]


def test_a_sample_of_files_is_saved_as_stored():
    sample = [*choose_sample()]
    assert len(sample) == len(corpus.CHANGES)
    different = compare(sample)
    assert not different, advise(different)


@pytest.mark.deep
@pytest.mark.parametrize("name", sorted({name for name, _ in CASES}))
def test_all_files_are_saved_as_stored(name):
    different = compare(case for case in CASES if case[0] == name)
    assert not different, advise(different)


def test_what_is_stored_is_what_is_compared():
    stored = {(name, change) for name, row in STORED.items() for change in row}
    assert stored <= {*CASES}, "python -m tests.support.corpus --stored drops these"
    assert STORED.keys() == {name for name, _ in CASES}


def test_another_structure_or_value_is_seen(monkeypatch):
    name = "sklearn_mlp.onnx"
    monkeypatch.setitem(corpus.CHANGES, "remat", corpus.CHANGES["moved values"])
    monkeypatch.setitem(corpus.CHANGES, "dropout", corpus.CHANGES["then"])
    different = compare([(name, "remat"), (name, "dropout"), (name, "as loaded")])
    assert [text.split(":")[0] for text in different] == [f"{name} | remat", f"{name} | dropout"]
    assert "corpus --stored" in advise(different)
