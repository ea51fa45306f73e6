"""What is minimized and measured: losses of outputs, what these need, metrics and tables."""
