"""Compare results of networks, files and runtimes; check files that were written."""
