"""Attention over paged keys and values: one backend per library behind one interface."""
