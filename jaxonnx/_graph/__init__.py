"""Bound graphs, and the roles of their tensors."""
