"""What really happened. It builds on `cost` and `plan`, and imports neither `data` nor `train`."""
