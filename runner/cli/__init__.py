"""The command line: its arguments, how it ends, and mistakes as one line."""
