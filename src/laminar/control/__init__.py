"""Decisions, pure: time and randomness come in as arguments, commands and reasons go out."""
