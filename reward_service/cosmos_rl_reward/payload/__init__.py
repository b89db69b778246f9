"""Reading of request bodies. Only the standard library and numpy: the front and every worker use it."""
