"""Cost of assignments: roofline, simulated schedule, memory, bounds."""
