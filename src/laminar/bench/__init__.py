"""Measurements that `laminar bench` makes: how fast one part is, alone."""
