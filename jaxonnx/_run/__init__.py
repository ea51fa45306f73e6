"""Evaluate bound graphs, compiled as far as possible."""
