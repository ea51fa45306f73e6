"""Read data in any form, and batch it."""
