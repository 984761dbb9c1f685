"""Measures machine and model, and ships hardware profiles."""
