"""The layers of benchmarks.networks, once for each way to write a network."""
