"""The turn: sequences, scheduler, engine, and the one thread border."""
