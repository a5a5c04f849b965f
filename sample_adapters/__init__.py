"""Adapters for the default base that ship with the product."""
