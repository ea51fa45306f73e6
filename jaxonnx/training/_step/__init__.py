"""A training step: its interface, how settings build one, its optimizer and layout of weights."""
