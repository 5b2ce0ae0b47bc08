"""State bytes; DataLoaders then yield ragged batches that fit those bytes and fill them."""

__version__ = "0.1.0.dev0"
