"""Core data structures without torch: graphs, devices, placements."""
