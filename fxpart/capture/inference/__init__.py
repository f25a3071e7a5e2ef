"""One pass forward as a graph: exported operator by operator, or traced module by module."""
