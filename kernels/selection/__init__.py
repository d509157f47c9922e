"""What is chosen from logits, on a GPU. The specification is services/worker/sampling/draw.py."""
