"""Which samples go together: NumPy in, NumPy out."""
