"""What a run prints and writes: terminal, metrics, figures, traces, text and JSON files."""
