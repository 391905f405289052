"""The DFlash block-diffusion drafter."""
