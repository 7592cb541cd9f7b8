"""From texts to tokens and back. Without torch."""
