"""The command line, `python -m torchbudget`: one file a command; nothing imports them.

Results go to stdout, everything else to stderr. A command ends with 0; with 1 where the answer is
no (a check that fails, sizes that do not fit, a step that cannot be measured); with 2 where it was
used wrongly.
"""
