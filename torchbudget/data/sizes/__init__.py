"""The sizes of samples."""
