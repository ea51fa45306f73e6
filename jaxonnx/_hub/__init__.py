"""Ways to Hugging Face: checkpoints of transformers, and folders that the hub stores."""
