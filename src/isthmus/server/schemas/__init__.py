"""Request bodies, a file for each endpoint or dialect."""
