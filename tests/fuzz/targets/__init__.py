"""One file a target: each has `TARGET`."""
