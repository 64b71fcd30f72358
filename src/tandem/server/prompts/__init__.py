"""From what a client sends to a prompt's token ids, without standing in anybody's way."""
