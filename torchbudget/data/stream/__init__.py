"""Streams: data without an index."""
