"""Bound graphs: everything looked up once, and what a graph says of its tensors."""
