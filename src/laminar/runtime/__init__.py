"""The real driver: processes, calls and clocks. The only folder that imports ray; it decides nothing."""
