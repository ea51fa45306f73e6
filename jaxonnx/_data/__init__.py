"""Examples in any form, as batches of one size and of a few widths."""
