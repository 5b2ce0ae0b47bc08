"""How a `DataLoader` stays within the host's memory: what it will need, and which options fit."""
