"""Samples that are expensive to read."""
