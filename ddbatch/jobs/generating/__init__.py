"""What job=generate is made of."""
