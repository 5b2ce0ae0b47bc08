"""The large-batch step. It builds on `cost` and `plan`, and does not import `data` or `observe`."""
