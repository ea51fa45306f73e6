"""Examples in any form, as batches of one size."""
