"""Flags for pictures and texts, which several commands have: the keys of `preprocess`."""

from jaxonnx.cli._flag_types import COUNT, FILE, NUMBERS, REAL, SIZE, SWITCH, Flag

PICTURES = {
    "images: the network gets (pixel * scale - mean) / std; the file may set the defaults": [
        Flag("--scale", "the factor for pixels from 0 to 255 (fallback: 1/255)", REAL),
        Flag(
            "--mean",
            "the mean: one number, or one per channel like 0.5,0.5,0.5 (fallback: 0)",
            NUMBERS,
        ),
        Flag("--std", "the standard deviation, in the same form (fallback: 1)", NUMBERS),
        Flag(
            "--labels",
            "the names of the classes: a file with one per line, or a list with commas (train: a "
            "new last layer, if the number differs)",
            {**FILE, "metavar": "FILE|A,B"},
        ),
        Flag("--size", "height and width of the images, for a network that accepts any size", SIZE),
        Flag("--order", "the order of the channels (fallback: RGB)", {"choices": ("RGB", "BGR")}),
        Flag("--crop", "the fraction of each side to keep, like 0.875 (fallback: 1)", REAL),
    ]
}
TEXTS = {
    "texts: tokens are those of the model's folder": [
        Flag("--max-length", "the maximum number of tokens of an example (default: 1024)", COUNT),
        Flag(
            "--long",
            "longer texts: cut, split into several examples, skip, or refuse (default: split plain "
            "texts, cut others)",
            {"choices": ("cut", "split", "skip", "refuse")},
        ),
        Flag(
            "--loss-on",
            "the tokens that the loss counts (default: completions)",
            {"choices": ("completions", "all")},
        ),
        Flag("--pack", "join short texts to rows of the maximum length", SWITCH),
    ]
}
