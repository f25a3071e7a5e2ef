"""One experiment: a typed configuration in, a placement and its cost out."""
