"""Data sets of other libraries that differ from other iterables: one file for each library."""
