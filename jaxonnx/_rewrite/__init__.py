"""Graphs changed: what `save` writes is changed as a ModelProto, what only training sees is not."""
