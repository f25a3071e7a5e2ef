"""Five systems under the names that people know from torch, slapo and inductor."""
