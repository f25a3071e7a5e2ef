"""Every figure that the docs quote, each printed by one command. Never part of the tests."""
