"""What an answer rests on, how likely it is right, and what may be promised of it."""
