"""Every figure that the README quotes, each printed by one command. Never part of the tests."""
