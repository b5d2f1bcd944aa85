"""Files of a checkpoint, and the match of its tensor names with a model's."""
