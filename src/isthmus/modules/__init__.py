"""What models are made of. The only place that binds a device and a weight format."""
