"""What an assignment costs: roofline, simulated schedule, memory, bounds."""
