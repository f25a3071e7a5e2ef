"""What a run is made of: typed sections, the shipped files, and choices made from a name."""
