"""What job=estimate is made of."""
