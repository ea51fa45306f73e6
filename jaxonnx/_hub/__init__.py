"""Ways to Hugging Face: names of transformers, checkpoints, and folders that the hub stores."""
