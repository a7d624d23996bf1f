"""Training: the DFlash recipe, and the script that makes the embedded pair."""
