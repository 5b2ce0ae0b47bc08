"""Costs of batches, stated and measured."""
