"""A training step as pure functions: its interface, how settings make one, and its optimizer."""
