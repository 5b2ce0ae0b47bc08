"""The large-batch step. It builds on `cost` and `plan`, and imports neither `data` nor `observe`."""
