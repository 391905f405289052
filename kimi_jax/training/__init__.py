"""Training of the bundled small model and of DFlash drafters."""
