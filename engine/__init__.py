"""The engine: a base, its adapters, and the loop that decodes. Import `engine.protocol` to talk to it."""
