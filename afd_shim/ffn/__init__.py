"""The FFN role: its serving loop and expert load balancing."""
