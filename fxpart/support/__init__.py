"""Base utilities without torch: compiled loops, atomic file writes, digests, host properties."""
