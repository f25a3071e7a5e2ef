"""Cut an fx module into submodules, one for each partition, which compute the same together."""
