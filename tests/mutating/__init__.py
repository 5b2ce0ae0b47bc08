"""What `tests/mutations.py` is made of."""
