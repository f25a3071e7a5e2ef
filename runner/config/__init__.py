"""The configuration of a run: the schema, shipped files, and choices made from a name."""
