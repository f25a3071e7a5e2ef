"""The output of a run: terminal, metrics, figures, traces, text and JSON files."""
