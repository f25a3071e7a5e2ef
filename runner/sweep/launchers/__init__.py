"""Where the jobs of a sweep run when not in the sweep's own process: one launcher a file."""
