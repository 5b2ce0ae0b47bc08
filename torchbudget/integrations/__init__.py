"""Adapters for frameworks that own the training loop: each is imported by its name."""
