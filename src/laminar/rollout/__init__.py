"""Generation: the engine interface and the embedded torch engine."""
