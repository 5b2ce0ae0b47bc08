"""Collates and the batch types that they make."""
