"""Values split over a group of devices: the local part of a model, and what the group exchanges."""
