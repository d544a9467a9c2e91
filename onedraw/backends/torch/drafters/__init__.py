"""Drafters that run on the device: DFlash, a draft model, an MTP head."""
