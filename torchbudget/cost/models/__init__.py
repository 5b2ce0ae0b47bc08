"""Cost models: frozen values, no measuring."""
