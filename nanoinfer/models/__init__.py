"""The architecture, and how its weights get from a checkpoint into it."""
