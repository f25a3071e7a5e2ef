"""Models by name: what they are (`spec`, without torch), and building them (`build`)."""
