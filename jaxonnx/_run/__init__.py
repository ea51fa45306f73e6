"""A bound graph on values, compiled as far as it can be."""
