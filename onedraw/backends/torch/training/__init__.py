"""Training of DFlash drafters: reading features of the target, the trainable drafter, the loss, and the optimizer's steps.
Serving never imports it."""
