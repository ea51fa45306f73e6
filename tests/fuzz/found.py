# ruff: noqa: E501 - packed files are one word
"""What the fuzzer found, by what was wrong: files that must be refused with an error, or run.

Models have the mode in which they are run, the draw of their inputs, and the file: ONNX text, or
packed (`tests.fuzz.shrink.unpacked`). Those that are compared must give what others give.
"""

MODELS: dict[str, tuple[str, int, str]] = {
    "perm of a weight that is no permutation": (
        "trace",
        0,
        """<ir_version: 10, opset_import: ["": 21]> g () => (float[n, m] y)
        <float[2, 3] w = {1, 2, 3, 4, 5, 6}> { y = Transpose<perm = [0, 2]>(w) }""",
    ),
    "a Loop with a trip count alone": (
        "compare",
        0,
        """<ir_version: 10, opset_import: ["": 21]> g () => (float[n] y) <int64 count = {3}> {
            y = Loop(count, "") <body = b (int64 i, bool on) => (bool go, float s) {
                go = Identity(on)
                s = Cast<to = 1>(i)
            }>
        }""",
    ),
    "with_any_batch where one batch is open without a name": (
        "trace",
        3960699276,
        """<ir_version: 10, opset_import: ["": 24]> g (float["?", 4] x, int64[1] k) => (y, i) {
            y, i = TopK(x, k)
        }""",
    ),
    "a float6 for an operator that does not take it (XLA aborts)": (
        "compare",
        0,
        """<ir_version: 13, opset_import: ["": 13]> g (float6e2m3[3, 4] x) => (y) {
            y = Hardmax(x)
        }""",
    ),
    "an Identity without outputs": (
        "trace",
        0,
        "c-rIOvhwEQ<zg&X;_ysK%`3?)spR70Vypm)2r*VFF*~ND2r;H>334zAFgh`odvP!@G}tpRFgQf<162ueadB`k3bAl8aWEw@b1_yrv2Za6hynnNK@9`",
    ),
}

FILES: dict[str, tuple[str, dict[str, str]]] = {
    "an .npy that is no array": (
        "weights",
        {
            "w.npz": "c-jl_W@Zs#fB;2?^9&Q}S%54MW&`4KL%qC$%Dnu%)BtZrCJ|=bDq*03kpZqRz?&5;#R!BZKw1N=0svD?4Ji"
        },
    ),
}
"""By what was wrong: the kind of the files, and those that differ from `tests.fuzz.files.made`."""
