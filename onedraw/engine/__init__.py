"""The engine: sequences, scheduler, the engine step, and the service that runs it on its own thread."""
