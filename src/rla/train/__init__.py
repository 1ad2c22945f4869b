"""Pretraining over PyTorch's own engine: recipes, the loop, checkpoints, metrics."""
