"""Sample inputs: arrays, text, images and sounds, split into held-out and calibration rows."""
