"""Bytes and files on one side, a ModelProto and its tensors on the other."""
