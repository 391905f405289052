"""What one step of a model holds, reads, computes and sends on a device, by part: the only place that counts it."""
