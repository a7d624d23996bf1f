"""What job=bench is made of."""
