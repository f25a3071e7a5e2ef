"""What strangers might type, write or define, by chance; and how the project takes it."""
