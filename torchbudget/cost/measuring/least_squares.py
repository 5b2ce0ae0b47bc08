"""Least squares: without negative coefficients, from above, and judged on what was left out."""

from __future__ import annotations

import math

import numpy as np

from torchbudget.cost.models.protocol import FloatArray


def non_negative(matrix: FloatArray, target: FloatArray) -> FloatArray:
    """The x ≥ 0 of the smallest ‖matrix·x − target‖.

    Lawson and Hanson's active set method ("Solving least squares problems", 1974, chapter 23),
    with columns scaled to length 1. Usually as many steps as columns.

    Args:
        matrix: shape `(k, c)`.
        target: shape `(k,)`.
    """
    lengths = np.linalg.norm(matrix, axis=0)
    scaled = matrix / np.where(lengths > 0, lengths, 1)
    x = np.zeros(matrix.shape[1])
    free = np.zeros(len(x), np.bool_)
    tolerance = 1e-10 * float(np.linalg.norm(target) or 1)
    for _ in range(10 * len(x)):
        gradient = np.where(free, -np.inf, scaled.T @ (target - scaled @ x))
        if gradient.max() <= tolerance:
            break
        free[gradient.argmax()] = True
        while True:  # until the solution on the free columns is positive
            step = np.zeros_like(x)
            step[free] = np.linalg.lstsq(scaled[:, free], target, rcond=None)[0]
            if (step[free] > 0).all():
                break
            # Go as far towards it as all stay positive, and fix those that arrive at 0.
            falling = free & (step <= 0)
            share = (x[falling] / (x[falling] - step[falling])).min()
            x += share * (step - x)
            free &= x > tolerance * 1e-6
            x[~free] = 0
        x = step
    return x / np.where(lengths > 0, lengths, 1)


def from_above(matrix: FloatArray, target: FloatArray, below: float) -> FloatArray:
    """Non-negative least squares where an error from below weighs `below` times as much.

    Newey and Powell, "Asymmetric least squares estimation and testing" (1987), by weighting anew.
    """
    weights = np.ones(len(target))
    for _ in range(10):
        x = non_negative(matrix * weights[:, None], target * weights)
        before, weights = weights, np.where(matrix @ x < target, math.sqrt(below), 1.0)
        if (weights == before).all():
            break
    return x


def left_out_errors(matrix: FloatArray, target: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Least squares, and the largest error of each column on a row by the fit to the other rows.

    The error on row i by the fit without it is its residual over 1 − hᵢ, where hᵢ is the diagonal
    of the projection onto the columns (Allen, "The relationship between variable selection and data
    augmentation and a method for prediction", 1974).
    """
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1
    left, singular, right = np.linalg.svd(matrix / scale, full_matrices=False)
    kept = singular > singular[0] * 1e-12
    left, singular, right = left[:, kept], singular[kept], right[kept]
    projected = left.T @ target
    solved = (right.T @ (projected / singular[:, None])) / scale[:, None]
    leverage = np.square(left).sum(axis=1, keepdims=True)
    residual = np.abs(target - left @ projected)
    errors = (residual / np.maximum(1 - leverage, 1e-9)).max(axis=0)
    return solved, errors
