"""NegativeLogLikelihoodLoss and SoftmaxCrossEntropyLoss."""

import numpy as np

from tests.ops.case_table import Case

rng = np.random.default_rng(0)


def f(*shape):
    return rng.normal(size=shape).astype(np.float32)


WEIGHTS = rng.uniform(0.5, 2, 4).astype(np.float32)
LABELS = np.array([2, 0, 3], np.int64)
MAP = rng.integers(0, 4, (2, 3, 2)).astype(np.int32)
IGNORED = np.where(MAP == 1, -5, MAP).astype(np.int64)
REDUCTIONS = [{"reduction": r} for r in ("none", "mean", "sum")]

CASES = [
    case
    for name, outputs in (("NegativeLogLikelihoodLoss", 1), ("SoftmaxCrossEntropyLoss", 2))
    for case in (
        Case(name, [f(3, 4), LABELS], outputs=outputs),
        *(
            Case(name, [f(2, 4, 3, 2), MAP, WEIGHTS], r, outputs, id=f"weighted_{r['reduction']}")
            for r in REDUCTIONS
        ),
        *(
            Case(
                name,
                [f(2, 4, 3, 2), IGNORED, WEIGHTS],
                r | {"ignore_index": -5},
                outputs,
                id=f"ignored_{r['reduction']}",
            )
            for r in REDUCTIONS
        ),
        Case(
            name, [f(2, 4, 3, 2), IGNORED], {"ignore_index": -5}, outputs, id="ignored_unweighted"
        ),
    )
]
