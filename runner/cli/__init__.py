"""The command line: arguments, exit codes, and errors in one line."""
