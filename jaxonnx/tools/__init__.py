"""Tools around `train` that stand on the public names of the package alone."""

from jaxonnx.tools._find_rate import RateCurve, find_rate
