"""Rewrites of the graph that `save` writes: from ModelProto to ModelProto, bound again."""
