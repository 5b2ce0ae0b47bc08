"""The large-batch step: it builds on `cost` and `plan`; `data` and `observe` are its neighbours."""
