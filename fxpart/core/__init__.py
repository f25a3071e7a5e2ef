"""What everything else works on: graphs, devices, placements. Without torch."""
