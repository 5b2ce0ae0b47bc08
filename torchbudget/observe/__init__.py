"""Memory as it really was: builds on `cost` and `plan`; `data` and `train` are neighbours."""
