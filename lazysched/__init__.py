"""lazysched."""
