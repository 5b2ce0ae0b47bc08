"""Measuring what a training step costs."""
