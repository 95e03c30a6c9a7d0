"""One run: its configuration, its rounds, its checkpoints and its folder."""
