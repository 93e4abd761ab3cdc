"""Where am I, and what works here."""
