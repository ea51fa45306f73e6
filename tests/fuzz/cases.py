"""Cases: files that are mutated the same way whenever they have the same seed and number."""

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from tests.fuzz import check, corpus, files
from tests.fuzz.check import Outcome
from tests.fuzz.mutate import mutated

SHARE = 0.1
"""Of the cases that are files of other formats."""
MODES = {"trace": 0.88, "compare": 0.1, "compile": 0.02}
"""How models are run, and how many of them: one that is compared takes as long as 15 others."""
TOGETHER, MODELS = 2000, 50
"""So many cases in a row are made of so many models."""


class Case(NamedTuple):
    """A file, and how it is tried: "model", or a kind of `files.KINDS`."""

    kind: str
    content: Any
    inputs: tuple[Any, ...] = ()
    mode: str = ""
    draw: int = 0
    name: str = ""


class Sources(NamedTuple):
    """What is mutated, and how."""

    models: list[corpus.Seed]
    files: dict[str, files.Files]
    seed: int
    only: str | None = None
    """"models", "compare" (models that are compared) or "files"."""

    def is_file(self, number: int) -> bool:
        """Return whether a case is a file of another format."""
        if self.only is not None:
            return self.only == "files"
        return Random(f"{self.seed} {number} kind").random() < SHARE

    def case(self, number: int) -> Case:
        random = Random(f"{self.seed} {number}")
        if self.is_file(number):
            kind = random.choice([*self.files])
            return Case(kind, files.broken(self.files[kind], random), name=kind)
        # neighbours share their models, and so what is compiled for them
        near = Random(f"{self.seed} {number // TOGETHER}").sample(self.models, MODELS)
        one, other = random.choice(near), random.choice(near)
        (mode,) = random.choices([*MODES], [*MODES.values()])
        mode = "compare" if self.only == "compare" else mode
        content = mutated(one.model, random, other.model, gently=mode == "compare")
        return Case("model", content, one.inputs, mode, random.getrandbits(32), one.name)

    def examine(self, number: int, stage: Callable[[str], None]) -> Outcome:
        return examine(self.case(number), stage)


def sources(seed: int, only: str | None = None) -> Sources:
    models = [] if only == "files" else corpus.seeds()
    return Sources(models, files.write_files() if only in (None, "files") else {}, seed, only)


def examine(case: Case, stage: Callable[[str], None] = lambda _: None) -> Outcome:
    """Try a case in this process."""
    if case.kind == "model":
        return check.model(case.content, case.inputs, case.mode, case.draw, stage)
    return files.examine(case.kind, case.content, stage)
