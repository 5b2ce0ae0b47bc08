"""What really happened: it builds on `cost` and `plan`; `data` and `train` are its neighbours."""
