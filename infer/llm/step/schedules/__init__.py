"""A step compared on every schedule: the same tokens given in every way that an engine gives them."""
