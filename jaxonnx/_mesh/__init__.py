"""Rules, shardings and processes of a mesh of devices."""

AUTOMATIC = ("data", "fsdp", "tensor")
"""Names of rules, which the command line reads without JAX."""
