"""Every operation the engine needs from a device, in torch."""
