"""Prompts, rewards, and the data store: the one truth for samples."""
