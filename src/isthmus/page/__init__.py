"""The web page of a run: served on this machine, from the run directory or the bucket alone."""
