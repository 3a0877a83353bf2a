"""Nothing in here is called from Python."""
