"""What a plan costs, read off its ops and the step tables; no arrays, no messages."""
