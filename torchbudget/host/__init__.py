"""How a `DataLoader` stays within the host's memory: its predicted bytes, and options that fit."""
