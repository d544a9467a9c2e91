"""The contract (speed never changes the answer) as tools for users: prove it for a model, record requests, replay them."""
