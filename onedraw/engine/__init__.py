"""The engine: sequences, the scheduler, the engine step, and the service that runs all of them on a thread of its own."""
