"""Training and evaluation of any network by one loop."""
