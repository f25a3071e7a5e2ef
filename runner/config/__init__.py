"""The configuration of a run: typed sections, shipped files, and choices made from a name."""
