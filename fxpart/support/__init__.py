"""What is under everything: compiled loops, whole files, digests, the host. Without torch."""
